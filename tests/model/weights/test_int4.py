"""Rounding to int4: against the definition of the format, and better than the plain way."""

import pytest
import torch

from kernels.gemm.block_dequantise import block_dequantise
from kernels.moe.w4a8_grouped_gemm_packing import (
    PackedWeights,
    dequantise_weights,
    pack_weights,
)
from model.weights import int4
from model.weights.int4 import dequantise_int4, quantise_int4
from tests.kernels.w4a8_cases import unpack_weights


def plain_rounding(weight: torch.Tensor) -> torch.Tensor:
    """The largest value of a group becomes 7."""
    groups = weight.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    return ((groups / scale).round() * scale).flatten(-2)


def test_nibbles_and_scales_are_where_the_format_has_them() -> None:
    weight = torch.zeros(2, 256)
    weight[0, :4] = torch.tensor([7.0, -7.0, 1.0, -3.0])
    weight[1, 128] = 14.0
    packed, scales = quantise_int4(weight)
    assert packed.dtype == torch.int8
    assert scales.dtype == torch.bfloat16
    assert packed.shape == (2, 128)
    assert scales.shape == (2, 2)
    # Two's complement, the even column low: 7 and -7, 1 and -3.
    assert [byte & 0xFF for byte in packed[0, :3].tolist()] == [0x97, 0xD1, 0x00]
    assert packed[1].tolist() == [0] * 64 + [7] + [0] * 63
    assert (scales[0, 0], scales[1, 1]) == (1.0, 2.0)
    assert torch.equal(dequantise_int4(packed, scales), weight)


@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy tails"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_plain_rounding(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(384, 512)
    if kind == "uniform":
        weight = torch.rand(384, 512) - 0.5
    elif kind == "heavy tails":
        weight = weight * torch.rand(384, 512).reciprocal().sqrt()
    weight = (0.02 * weight).to(dtype)
    got = dequantise_int4(*quantise_int4(weight))
    error = (got - weight).norm() / weight.float().norm()
    plain = (plain_rounding(weight) - weight).norm() / weight.float().norm()
    assert error <= plain * 1.002  # scales in bfloat16 cost a little
    assert error < 0.11 or kind == "heavy tails"
    if kind != "uniform":
        assert error < 0.93 * plain


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(2)
    weight = torch.randn(1500, 128)
    packed, scales = quantise_int4(weight)
    for rows in (slice(0, 3), slice(1020, 1030), slice(1499, None)):
        own = quantise_int4(weight[rows])
        assert torch.equal(own[0], packed[rows])
        assert torch.equal(own[1], scales[rows])


def fp8_matrix() -> tuple[torch.Tensor, torch.Tensor]:
    """[300, 384] e4m3 and its scales: the last blocks of rows are cut off."""
    torch.manual_seed(4)
    weight = (100 * torch.randn(300, 384)).to(torch.float8_e4m3fn)
    return weight, 1e-4 * (torch.rand(3, 3) + 0.5)


def test_from_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 128 rows, what comes of the whole matrix in float32."""
    weight, scale_inv = fp8_matrix()
    want = quantise_int4(block_dequantise(weight, scale_inv, torch.float32))
    monkeypatch.setitem(int4._CHUNK, "cpu", 384 * 128)
    got = quantise_int4(weight, scale_inv)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def best_by_definition(group: torch.Tensor) -> float:
    """The least squared error of the 19 scales, in double precision."""
    errors = []
    for ratio in torch.linspace(1.0, 0.55, 19).tolist():
        scale = (group.abs().max() / 7 * ratio).to(torch.bfloat16).double()
        value = (group.double() / scale).round().clamp(-8, 7) * scale
        errors.append(float((value - group.double()).square().sum()))
    return min(errors)


def test_the_search_finds_the_best_scale() -> None:
    """All but: whole numbers stand for weights, the largest for at least 1,792."""
    torch.manual_seed(5)
    weight = torch.randn(64, 128) * torch.logspace(-30, 30, 64).unsqueeze(1)
    got = dequantise_int4(*quantise_int4(weight)).double()
    for row, group in zip(got, weight, strict=True):
        error = float((row - group.double()).square().sum())
        assert error <= 1.01 * best_by_definition(group)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    weight, scale_inv = fp8_matrix()
    torch.manual_seed(6)
    plain = torch.randn(1500, 1024) * torch.logspace(-38, 30, 1500).unsqueeze(1)
    plain[3] = 0
    for arguments in ((weight, scale_inv), (plain, None), (plain[:64].bfloat16(), None)):
        on_gpu = [None if one is None else one.cuda() for one in arguments]
        for got, want in zip(quantise_int4(*on_gpu), quantise_int4(*arguments), strict=True):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-30, 1e30, -3e-5])
def test_groups_of_equal_or_extreme_values(value: float) -> None:
    weight = torch.full((1, 128), value)
    got = dequantise_int4(*quantise_int4(weight))
    assert torch.isfinite(got).all()
    assert torch.allclose(got, weight, rtol=0.01, atol=1e-37)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="130 columns are no multiple of 128"):
        quantise_int4(torch.ones(2, 130))
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(2, 128)
        weight[1, 7] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantise_int4(weight)


def test_what_kernels_read_is_what_was_written() -> None:
    torch.manual_seed(3)
    weights = torch.randn(3, 256, 384)
    made = [quantise_int4(weight) for weight in weights]
    packed = pack_weights([one[0] for one in made], [one[1] for one in made])
    want = torch.stack([dequantise_int4(*one) for one in made])
    assert torch.equal(dequantise_weights(packed), want)
    values, scales = unpack_weights(packed)
    assert torch.equal(values.float() * scales.repeat_interleave(128, dim=-1), want)
    assert torch.equal(dequantise_weights(PackedWeights(packed.blocks[1:2])), want[1:2])
