"""Grouped GEMM of FP8 activations and int4 weights.

    out[i, n] = sum over k of x[i, k] * x_scale[i, k / 128] * w[e][n, k] * w_scale[e][n, k / 128]

with e the expert of row i.

    activations        [E, C, K] (masked) or [M, K] (contiguous)  float8_e4m3fn, contiguous
    activation_scales  [E, C, K / 128] or [M, K / 128] float32, any strides; or one of a whole row,
                       [E, C, 1] or [M, 1]; or one float32 for all
    weights            PackedWeights of E experts, N x K: int4, float32 scales per 128 along K
    counts             [E] int32, on the device of the activations: rows of each expert
    out                [E, C, N] or [M, N]  bfloat16

Masked: expert e has its rows at activations[e, : counts[e]]. Contiguous: rows of expert 0, then of
expert 1, ... without gaps. Further rows are neither read nor written. N and K are multiples of 128.
One scale a row, or for all, takes half as many float instructions.

On Hopper a CUDA kernel runs, else the reference. The kernel never waits for the host and can be
captured in a CUDA graph after one call outside of it. It sums in float16: products of 128 columns
in the matrix unit, and these, scaled, eight at a time. Scales are shares of their row's largest, or
token's, so that their size does not matter. It is within TOLERANCE of the reference, which sums in
float32, relative by norm; rounding to bfloat16 is 1.7e-3 of that.
"""

from typing import Any

import torch

from kernels.build.fp8_scales import empty_scales
from kernels.build.operands import check_contiguous, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import check_scale
from kernels.elementwise.silu_mul import silu_mul_quantise
from kernels.gemm.linear import linear
from kernels.moe import w4a8_grouped_gemm_cuda
from kernels.moe.w4a8_grouped_gemm_packing import GROUP, PackedWeights, dequantise_weights

TOLERANCE = 2e-3
# For more rows an expert, a product and its activation take as long by themselves, or less.
_MOST_GATED = 128


def w4a8_grouped_gemm_masked(
    activations: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: PackedWeights,
    counts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Masked layout. `expected_rows`, the rows that an expert is likely to have (default: C),
    picks among tiles, whose results differ by rounding. `early`: weights and counts were there
    before the kernel launched last began, so that this one may begin while that ends.
    Raises ValueError for arguments that do not fit."""
    _check_masked(activations, activation_scales, weights, counts)
    return _product(
        activations, activation_scales, weights, counts, out, capacity=activations.shape[1],
        expected_rows=expected_rows, early=early,
    )  # fmt: skip


def w4a8_grouped_gemm_gated(
    activations: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: PackedWeights,
    counts: torch.Tensor,
    *,
    out_scale: torch.Tensor | None = None,
    expected_rows: int | None = None,
    leads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked layout of gate_up, gate half first: what `silu_mul.silu_mul_quantise`
    makes of `out`, (values [E, C, N / 2] float8_e4m3fn, scales [E, C, N / 256]); or, with an
    `out_scale` [] float32 that the caller has, (values quantised with it, `out_scale`).
    `expected_rows` as in `w4a8_grouped_gemm_masked`; `leads`: the next kernel, if it is one that
    begins early, may take multiprocessors as soon as this one leaves them. Raises ValueError for
    arguments that do not fit, and unless N is a multiple of 256."""
    _check_masked(activations, activation_scales, weights, counts)
    check_scale(activations, out_scale)
    if weights.num_outputs % (2 * GROUP):
        raise ValueError(f"N = {weights.num_outputs} is not a multiple of {2 * GROUP}")
    capacity = activations.shape[1]
    likely = capacity if expected_rows is None else expected_rows
    is_cuda = path_of("w4a8_grouped_gemm", activations.device) == "cuda"
    if not is_cuda or likely > _MOST_GATED:
        given = (activations, activation_scales, weights, counts)
        inner = w4a8_grouped_gemm_masked(*given, expected_rows=expected_rows)
        return silu_mul_quantise(inner, counts, scale=out_scale, expected_rows=expected_rows or 0)
    shape = (*activations.shape[:-1], weights.num_outputs // 2)
    out = activations.new_empty(shape)
    out_scales = empty_scales(out) if out_scale is None else out_scale.view(())
    if activations.numel():
        w4a8_grouped_gemm_cuda.launch(
            activations, activation_scales, _strides(activation_scales), weights.blocks, counts,
            out, capacity=capacity, expected_rows=likely, out_scales=out_scales, leads=leads,
        )  # fmt: skip
    return out, out_scales


def w4a8_grouped_gemm_contiguous(
    activations: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: PackedWeights,
    counts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Contiguous layout. `expected_rows` as in the masked one (default: M / E)."""
    if activations.dim() != 2:
        raise ValueError(f"activations are [M, K], not {tuple(activations.shape)}")
    _check(activations, activation_scales, weights, counts)
    if expected_rows is None:
        expected_rows = -(-activations.shape[0] // weights.num_experts)
    return _product(
        activations, activation_scales, weights, counts, out, capacity=0,
        expected_rows=expected_rows,
    )  # fmt: skip


def _product(
    activations: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: PackedWeights,
    counts: torch.Tensor,
    out: torch.Tensor | None,
    *,
    capacity: int,
    expected_rows: int | None,
    early: bool = False,
) -> torch.Tensor:
    """In the masked layout of so many rows an expert, or, of 0, in the contiguous one."""
    out = _output(activations, weights, out)
    if not activations.numel():
        return out
    if path_of("w4a8_grouped_gemm", activations.device) != "cuda":
        given = activations, activation_scales, weights, counts
        return w4a8_grouped_gemm_reference(*given, out=out)
    w4a8_grouped_gemm_cuda.launch(
        activations, activation_scales, _strides(activation_scales), weights.blocks, counts, out,
        capacity=capacity, expected_rows=capacity if expected_rows is None else expected_rows,
        early=early,
    )  # fmt: skip
    return out


def w4a8_grouped_gemm_reference(
    activations: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: PackedWeights,
    counts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the product is, masked or contiguous by the activations' dimensions; waits for the
    counts."""
    _check(activations, activation_scales, weights, counts)
    out = _output(activations, weights, out)
    stop = 0
    for expert, count in enumerate(counts.clamp(0, activations.shape[-2]).tolist()):
        if not count:
            continue
        if activations.dim() == 3:
            where: Any = (expert, slice(count))
        else:
            start, stop = stop, stop + count
            where = slice(start, stop)
        rows, scales = activations[where].float(), activation_scales
        if scales.numel() > 1:
            scales = scales[where]
            scales = scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], dim=-1)
        out[where] = linear(rows * scales, _matrix(weights, expert))
    return out


def _matrix(weights: PackedWeights, expert: int) -> torch.Tensor:
    """[N, K] float32 weights of an expert."""
    return dequantise_weights(PackedWeights(weights.blocks[expert : expert + 1]))[0]


def _strides(scales: torch.Tensor) -> tuple[int, int, int]:
    """By expert, row and group of columns; the last is 0 where a row has one scale."""
    if scales.numel() == 1:
        return 0, 0, 0
    *outer, row, group = scales.stride()
    return outer[0] if outer else 0, row, 0 if scales.shape[-1] == 1 else group


def _check_masked(
    activations: torch.Tensor, scales: torch.Tensor, weights: PackedWeights, counts: torch.Tensor
) -> None:
    """Raises ValueError for arguments that do not fit."""
    if activations.dim() != 3:
        raise ValueError(f"activations are [E, C, K], not {tuple(activations.shape)}")
    _check(activations, scales, weights, counts)
    if activations.shape[0] != weights.num_experts:
        raise ValueError(f"{activations.shape[0]} experts' rows, {weights.num_experts} experts")


def _check(
    activations: torch.Tensor, scales: torch.Tensor, weights: PackedWeights, counts: torch.Tensor
) -> None:
    """Raises ValueError for arguments that do not fit."""
    device, k = activations.device, weights.num_inputs
    check_operand("activations", activations, device, torch.float8_e4m3fn)
    check_operand("activation scales", scales, device, torch.float32)
    check_operand("weights", weights.blocks, device, torch.uint8)
    check_operand("counts", counts, device, torch.int32, shape=(weights.num_experts,))
    check_contiguous(activations=activations, counts=counts)
    if activations.shape[-1] != k:
        raise ValueError(f"activations have K = {activations.shape[-1]}, weights have {k}")
    if k > w4a8_grouped_gemm_cuda.MAX_INPUTS:
        raise ValueError(f"K = {k}: at most {w4a8_grouped_gemm_cuda.MAX_INPUTS}")
    if activations.data_ptr() % 16:
        raise ValueError("activations are aligned to 16 bytes")
    by_group, by_row = ((*activations.shape[:-1], columns) for columns in (k // GROUP, 1))
    if scales.numel() != 1 and scales.shape not in (by_group, by_row):
        raise ValueError(f"scales are {by_group} or {by_row} or one, not {tuple(scales.shape)}")
    if weights.num_experts > w4a8_grouped_gemm_cuda.MAX_EXPERTS:
        raise ValueError(
            f"{weights.num_experts} experts: at most {w4a8_grouped_gemm_cuda.MAX_EXPERTS} a call"
        )


def _output(
    activations: torch.Tensor, weights: PackedWeights, out: torch.Tensor | None
) -> torch.Tensor:
    """Made unless given. Raises ValueError for one that does not fit."""
    shape = (*activations.shape[:-1], weights.num_outputs)
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=activations.device)
    check_operand("out", out, activations.device, torch.bfloat16, shape=shape)
    check_contiguous(out=out)
    return out
