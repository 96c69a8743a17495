"""Packed rows: their parts are what went in, and Triton packs the same bytes."""

from typing import Any

import pytest
import torch

from kernels.elementwise.quantise import quantise_reference
from kernels.moe import pack_tokens_triton
from kernels.moe.pack_tokens import pack_tokens, pack_tokens_reference, unpack
from kernels.moe.packed_row import ROW_WORDS, PackedRow
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, assert_same_fp8, dtypes

CHOICES, FP8 = 3, torch.float8_e4m3fn


def tokens(
    request: pytest.FixtureRequest, num_tokens: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns of wider tensors."""
    rng = generator(request.node.nodeid)
    hidden = randn(rng, num_tokens, width + 8).to(dtype)[:, 8:]
    topk_idx = torch.randint(-1, 99, (num_tokens, CHOICES + 2), generator=rng)[:, 2:]
    return hidden, topk_idx, torch.rand(num_tokens, CHOICES + 1, generator=rng)[:, 1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 128, 250])
def test_what_goes_in_comes_out(
    request: pytest.FixtureRequest, dtype: torch.dtype, width: int
) -> None:
    hidden, topk_idx, weights = tokens(request, 5, width, dtype)
    packed = pack_tokens(hidden, topk_idx, weights, 7, quantises=False)
    assert packed.shape[1] % ROW_WORDS == 0
    assert packed.shape[1] < width + 2 * CHOICES + 1 + ROW_WORDS
    found = unpack(packed, width, CHOICES, dtype)
    assert torch.equal(found.hidden[:5], hidden)
    assert torch.equal(found.topk_idx[:5].long(), topk_idx)
    assert torch.equal(found.weights[:5], weights)
    assert found.scales is None
    assert found.topk_idx[5:].eq(-1).all()


# How rows are quantised.
GROUPS: dict[str, Any] = {}
STATIC = {"scale": torch.tensor(0.01)}


def scales_of(how: dict[str, Any] | None, width: int) -> int:
    if how is None or how is STATIC:
        return 0
    return width // 128


@pytest.mark.parametrize("how", [GROUPS, STATIC])
def test_quantised_on_the_way(request: pytest.FixtureRequest, how: dict[str, Any]) -> None:
    num_scales = scales_of(how, 384)
    hidden, topk_idx, weights = tokens(request, 5, 384, torch.bfloat16)
    packed = pack_tokens(hidden, topk_idx, weights, 5, quantises=True, **how)
    place = PackedRow.of(384, 1, CHOICES, num_scales)
    assert packed.shape[1] == place.size == 112
    assert place.ids - place.scales == num_scales
    found = unpack(packed, 384, CHOICES, FP8, num_scales)
    values, scales = quantise_reference(hidden, **how)
    assert torch.equal(found.hidden.float(), values.float())
    if found.scales is None:
        assert not num_scales
    else:
        assert torch.equal(found.scales, scales)
    assert torch.equal(found.topk_idx.long(), topk_idx)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("how", [None, GROUPS, STATIC])
def test_triton(
    request: pytest.FixtureRequest, device: str, num_tokens: int, how: dict[str, Any] | None
) -> None:
    dtype, num_scales = dtypes()[-1], scales_of(how, 1280)
    parts = [part.to(device) for part in tokens(request, num_tokens, 1280, dtype)]
    given = {"scale": STATIC["scale"].to(device)} if how is STATIC else how or {}
    found, want = (
        unpack(
            pack(*parts, 6, quantises=how is not None, **given),
            1280, CHOICES, dtype if how is None else FP8, num_scales,
        )
        for pack in (pack_tokens_triton.launch, pack_tokens_reference)
    )  # fmt: skip
    assert torch.equal(found.topk_idx, want.topk_idx)
    assert torch.equal(found.weights, want.weights)
    own = slice(0, num_tokens)
    if how is not None and num_tokens:
        scales = (parts[2], parts[2]) if not num_scales else (found.scales[own], want.scales[own])
        assert_same_fp8((found.hidden[own], scales[0]), (want.hidden[own], scales[1]))
    else:
        assert torch.equal(found.hidden[own].float(), want.hidden[own].float())


def test_what_does_not_fit_is_refused() -> None:
    hidden, idx, weights = torch.zeros(2, 8), torch.zeros(2, 1).long(), torch.zeros(2, 1)
    for arguments, quantises in (
        ((hidden[:1], idx, weights, 2), False),
        ((hidden, idx, weights, 1), False),
        ((hidden.half(), idx, weights, 2), False),
        ((hidden, idx, weights, 2), True),
    ):
        with pytest.raises(ValueError):
            pack_tokens(*arguments, quantises=quantises)
