"""Triton path of `kernels.moe.fused_moe`.

FP8 activations are copied to the rows of their experts, whose blocks then come by descriptors: the
products are those of `kernels.gemm.fp8_gemm_triton`. Others are gathered by the first product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.build.fp8_gemm_blocks import ALIGNED, Fp8Blocks, default_fp8_blocks
from kernels.build.fp8_scales import GROUP, empty_scales
from kernels.build.tuned import Blocks, blocks_for
from kernels.elementwise.combine_triton import launch as combine
from kernels.elementwise.quantise_triton import launch as quantise
from kernels.elementwise.silu_mul_triton import launch as silu_mul
from kernels.elementwise.silu_mul_triton import launch_quantise as silu_mul_quantise
from kernels.gemm.fp8_gemm_choice import fp8_blocks
from kernels.gemm.fp8_gemm_triton import aligned as fp8_aligned
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.permute_triton import CHUNK, rank_choices

GATHERING = 2048  # programs that copy rows, at most


class _Rows(NamedTuple):
    """Choices by expert, each expert's part aligned to the block of a product.

    token_of  [M] int32, -1: padding;  expert_of [M / block] int32, -1: nothing there
    row_of    [K, T] int32;  num_used [1] int32: how many of the M are in use
    """

    token_of: torch.Tensor
    expert_of: torch.Tensor
    row_of: torch.Tensor
    num_used: torch.Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def _align(
    topk_idx, rank_of, counts, token_of, expert_of, row_of, num_used, num_tokens, num_choices,
    num_experts,
    block_m: tl.constexpr, experts: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * chunk + tl.arange(0, chunk)
    is_entry = entry < num_tokens * num_choices
    expert = tl.load(topk_idx + entry, mask=is_entry, other=-1)
    here = (expert >= 0) & (expert < num_experts)  # others have neither rank nor room
    index = tl.arange(0, experts)
    count = tl.load(counts + index, mask=index < num_experts, other=0)
    padded = (count + block_m - 1) // block_m * block_m
    if tl.program_id(0) == 0:
        tl.store(num_used, tl.sum(padded, axis=0))
    start = tl.sum(tl.where(index[None, :] < expert[:, None], padded[None, :], 0), axis=1)
    row = start + tl.load(rank_of + entry, mask=here, other=0)
    token, choice = entry // num_choices, entry % num_choices
    tl.store(token_of + row, token.to(tl.int32), mask=here)
    tl.store(expert_of + row // block_m, expert.to(tl.int32), mask=here)
    place = row_of + choice * num_tokens + token
    tl.store(place, tl.where(here, row, -1).to(tl.int32), mask=is_entry)


@triton.jit(do_not_specialize=["scale_group_stride", "out_group_stride"])
def _gather(
    x, x_scale, token_of, num_used, out, out_scale, width, scale_row_stride, scale_group_stride,
    out_group_stride,
    block: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """A row in use a program at a time; padding keeps what is there."""
    for row in range(tl.program_id(0), tl.load(num_used), tl.num_programs(0)):
        token = tl.load(token_of + row).to(tl.int64)
        if token >= 0:
            column = tl.arange(0, block)
            values = tl.load(x + token * width + column, mask=column < width)
            tl.store(out + tl.cast(row, tl.int64) * width + column, values, mask=column < width)
            index = tl.arange(0, groups)
            inside = index * group < width
            place = x_scale + token * scale_row_stride + index * scale_group_stride
            factor = tl.load(place, mask=inside)
            tl.store(out_scale + index * out_group_stride + row, factor, mask=inside)


@triton.jit
def _grouped(
    x, weight, out, token_of, expert_of, n, k,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, gathers: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_of + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    token = tl.load(token_of + row)
    is_row = token >= 0
    source = tl.where(is_row, token, 0) if gathers else row
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_column = column < n
    total = tl.zeros([block_m, block_n], tl.float32)
    for first in range(0, k, block_k):
        index = first + tl.arange(0, block_k)
        is_index = index < k
        x_tile = tl.load(
            x + source.to(tl.int64)[:, None] * k + index[None, :],
            mask=is_row[:, None] & is_index[None, :], other=0.0,
        )  # fmt: skip
        w_tile = tl.load(
            weight + (expert * n + column)[:, None] * k + index[None, :],
            mask=is_column[:, None] & is_index[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(x_tile, tl.trans(w_tile), input_precision=precision)
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


def launch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: FusedExperts,
    expected_rows: int | None = None,
) -> torch.Tensor:
    if not hidden.numel():
        return torch.empty_like(hidden)
    num_experts, double_width, width = experts.gate_up.shape
    if expected_rows is None:
        expected_rows = triton.cdiv(topk_idx.numel(), num_experts)
    hidden = hidden.contiguous()
    shapes = ((double_width, width), (width, double_width // 2))
    if experts.is_fp8:
        cuts = fp8_cuts(hidden.device, expected_rows, *shapes)
        rows = _aligned(topk_idx.contiguous(), num_experts, cuts[0].block_m)
        out = _fp8_products(hidden, rows, experts, cuts, expected_rows)
    else:
        up, down = (
            blocks_for(hidden.device, experts.gate_up.dtype, num_experts, *shape, expected_rows)
            for shape in shapes
        )
        rows = _aligned(topk_idx.contiguous(), num_experts, up.block_m)
        middle = _run(hidden, experts.gate_up, rows, up, gathers=True)
        out = _run(silu_mul(middle), experts.down, rows, down, gathers=False)
    return combine(out, rows.row_of, topk_weights, None)


def fp8_cuts(
    device: torch.device, expected_rows: int, up: tuple[int, int], down: tuple[int, int]
) -> tuple[Fp8Blocks, Fp8Blocks]:
    """Of the two products [N, K], with blocks of one height."""
    cuts = [fp8_blocks(device, ALIGNED, expected_rows, *shape) for shape in (up, down)]
    if cuts[0].block_m != cuts[1].block_m:  # one of them is not tuned
        cuts = [default_fp8_blocks(ALIGNED, expected_rows, *shape) for shape in (up, down)]
    return cuts[0], cuts[1]


def _fp8_products(
    hidden: torch.Tensor,
    rows: _Rows,
    experts: FusedExperts,
    cuts: tuple[Fp8Blocks, Fp8Blocks],
    expected_rows: int,
) -> torch.Tensor:
    """[M, H]."""
    assert experts.gate_up_scale is not None
    assert experts.down_scale is not None
    num_experts = len(experts.down)
    values, scales = gather(*quantise(hidden), rows)
    where = (rows.expert_of, rows.num_used)
    up = experts.gate_up.contiguous(), experts.gate_up_scale
    middle = fp8_aligned((values, scales, *up), *where, cuts[0], hidden.dtype)
    values, scales = silu_mul_quantise(
        middle,
        rows.num_used,
        expected_rows=num_experts * max(expected_rows, cuts[0].block_m),
    )
    down = experts.down.contiguous(), experts.down_scale
    return fp8_aligned((values, scales, *down), *where, cuts[1], hidden.dtype)


def gather(
    x: torch.Tensor, x_scale: torch.Tensor, rows: _Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised [T, H] and scales -> [M, H] and scales."""
    num_rows, width = len(rows.token_of), x.shape[1]
    out = x.new_empty(num_rows, width)
    out_scale = empty_scales(out)
    num_groups = width // GROUP
    # Bytes are bytes: FP8 travels as what every Triton knows.
    _gather[(min(num_rows, GATHERING),)](
        x.view(torch.uint8), x_scale, rows.token_of, rows.num_used, out.view(torch.uint8),
        out_scale, width, *x_scale.stride(), out_scale.stride(1),
        block=triton.next_power_of_2(width), groups=triton.next_power_of_2(num_groups),
        group=GROUP, num_warps=4,
    )  # fmt: skip
    return out, out_scale


def _aligned(topk_idx: torch.Tensor, num_experts: int, block_m: int) -> _Rows:
    num_tokens, num_choices = topk_idx.shape
    rank_of, counts = rank_choices(topk_idx, num_experts)
    num_entries = topk_idx.numel()
    num_blocks = triton.cdiv(num_entries + min(num_experts, num_entries) * (block_m - 1), block_m)
    integers = {"dtype": torch.int32, "device": topk_idx.device}
    rows = _Rows(
        torch.full((num_blocks * block_m,), -1, **integers),
        torch.full((num_blocks,), -1, **integers),
        torch.empty((num_choices, num_tokens), **integers),
        torch.empty(1, **integers),
    )
    chunk = min(CHUNK, 128)
    _align[(triton.cdiv(num_entries, chunk),)](
        topk_idx, rank_of, counts, *rows, num_tokens, num_choices, num_experts, block_m=block_m,
        experts=triton.next_power_of_2(num_experts), chunk=chunk, num_warps=4,
    )  # fmt: skip
    return rows


def _run(
    x: torch.Tensor, weight: torch.Tensor, rows: _Rows, blocks: Blocks, *, gathers: bool
) -> torch.Tensor:
    """The rows are aligned to the first product's blocks; the second keeps that height."""
    _, n, k = weight.shape
    out = x.new_empty(len(rows.token_of), n)
    block_m = len(rows.token_of) // len(rows.expert_of)
    _grouped[triton.cdiv(n, blocks.block_n), len(rows.expert_of)](
        x, weight.contiguous(), out, rows.token_of, rows.expert_of, n, k,
        block_m=block_m, block_n=blocks.block_n, block_k=blocks.block_k, gathers=gathers,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return out
