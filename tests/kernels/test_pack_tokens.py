"""Packed rows: their parts are what went in, and Triton packs the same bytes."""

import pytest
import torch

from kernels import pack_tokens_triton
from kernels.pack_tokens import ROW_WORDS, PackedRow, pack_tokens, pack_tokens_reference, unpack
from kernels.quantise import quantise_reference
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


def test_quantised_on_the_way(request: pytest.FixtureRequest) -> None:
    hidden, topk_idx, weights = tokens(request, 5, 384, torch.bfloat16)
    packed = pack_tokens(hidden, topk_idx, weights, 5, quantises=True)
    assert packed.shape[1] == PackedRow.of(384, 2, CHOICES, quantises=True).size == 112
    found, (values, scales) = unpack(packed, 384, CHOICES, FP8), quantise_reference(hidden)
    assert found.scales is not None
    assert torch.equal(found.hidden.float(), values.float())
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.topk_idx.long(), topk_idx)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("quantises", [False, True])
def test_triton(
    request: pytest.FixtureRequest, device: str, num_tokens: int, quantises: bool
) -> None:
    dtype = dtypes()[-1]
    parts = [part.to(device) for part in tokens(request, num_tokens, 1280, dtype)]
    found, want = (
        unpack(
            pack(*parts, 6, quantises=quantises),
            1280, CHOICES, FP8 if quantises else dtype,
        )
        for pack in (pack_tokens_triton.launch, pack_tokens_reference)
    )  # fmt: skip
    assert torch.equal(found.topk_idx, want.topk_idx)
    assert torch.equal(found.weights, want.weights)
    own = slice(0, num_tokens)
    if quantises and num_tokens:
        assert_same_fp8(
            (found.hidden[own], found.scales[own]), (want.hidden[own], want.scales[own])
        )
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
