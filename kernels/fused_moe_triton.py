"""Triton path of `kernels.fused_moe`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.combine_triton import launch as combine
from kernels.fused_moe import Experts
from kernels.permute_triton import CHUNK, rank_choices
from kernels.quantise_triton import launch as quantise
from kernels.silu_mul_triton import launch as silu_mul
from kernels.silu_mul_triton import launch_quantise as silu_mul_quantise
from kernels.tuned import Blocks, blocks_for

GROUP = tl.constexpr(128)


class _Rows(NamedTuple):
    """Choices by expert, each expert's part aligned to the block of a product.

    token_of  [M] int32, -1: padding;  expert_of [M / block] int32, -1: nothing there
    row_of    [K, T] int32
    """

    token_of: torch.Tensor
    expert_of: torch.Tensor
    row_of: torch.Tensor


@triton.jit
def _align(
    topk_idx, rank_of, counts, token_of, expert_of, row_of, num_tokens, num_choices, num_experts,
    block_m: tl.constexpr, experts: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * chunk + tl.arange(0, chunk)
    is_entry = entry < num_tokens * num_choices
    expert = tl.load(topk_idx + entry, mask=is_entry, other=-1)
    here = expert >= 0
    index = tl.arange(0, experts)
    count = tl.load(counts + index, mask=index < num_experts, other=0)
    padded = (count + block_m - 1) // block_m * block_m
    start = tl.sum(tl.where(index[None, :] < expert[:, None], padded[None, :], 0), axis=1)
    row = start + tl.load(rank_of + entry, mask=here, other=0)
    token, choice = entry // num_choices, entry % num_choices
    tl.store(token_of + row, token.to(tl.int32), mask=here)
    tl.store(expert_of + row // block_m, expert.to(tl.int32), mask=here)
    place = row_of + choice * num_tokens + token
    tl.store(place, tl.where(here, row, -1).to(tl.int32), mask=is_entry)


@triton.jit
def _grouped(
    x, x_scale, weight, w_scale, out, token_of, expert_of, n, k, x_scale_row_stride,
    x_scale_group_stride,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, gathers: tl.constexpr,
    is_fp8: tl.constexpr, precision: tl.constexpr,
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
        product = tl.dot(x_tile, tl.trans(w_tile), input_precision=precision)
        if is_fp8:
            group = first // GROUP
            place = x_scale + source * x_scale_row_stride + group * x_scale_group_stride
            factor = tl.load(place, mask=is_row, other=0.0)
            line = (expert * tl.cdiv(n, GROUP) + column // GROUP) * (k // GROUP) + group
            product *= factor[:, None] * tl.load(w_scale + line, mask=is_column, other=0.0)[None, :]
        total += product
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


def launch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Experts,
    scaling: float,
) -> torch.Tensor:
    if not hidden.numel():
        return torch.empty_like(hidden)
    num_experts, double_width, width = experts.gate_up.shape
    rows_an_expert = triton.cdiv(topk_idx.numel(), num_experts)
    shape = (hidden.device, experts.gate_up.dtype, num_experts)
    up = blocks_for(*shape, double_width, width, rows_an_expert)
    down = blocks_for(*shape, width, double_width // 2, rows_an_expert)
    rows = _aligned(topk_idx.contiguous(), num_experts, up.block_m)
    hidden = hidden.contiguous()
    num_rows = len(rows.token_of)
    middle = hidden.new_empty(num_rows, double_width)
    out = hidden.new_empty(num_rows, width)
    if experts.is_fp8:
        values, scales = quantise(hidden.unsqueeze(0), None, squeeze=True)
        _run(values, scales, experts.gate_up, experts.gate_up_scale, middle, rows, up, gathers=True)
        values, scales = silu_mul_quantise(middle.unsqueeze(0), None, squeeze=True)
        _run(values, scales, experts.down, experts.down_scale, out, rows, down, gathers=False)
    else:
        _run(hidden, None, experts.gate_up, None, middle, rows, up, gathers=True)
        _run(silu_mul(middle), None, experts.down, None, out, rows, down, gathers=False)
    return combine(out, rows.row_of, topk_weights, scaling, None)


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
    )
    chunk = min(CHUNK, 128)
    _align[(triton.cdiv(num_entries, chunk),)](
        topk_idx, rank_of, counts, *rows, num_tokens, num_choices, num_experts, block_m=block_m,
        experts=triton.next_power_of_2(num_experts), chunk=chunk, num_warps=4,
    )  # fmt: skip
    return rows


def _run(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    rows: _Rows,
    blocks: Blocks,
    *,
    gathers: bool,
) -> None:
    """The rows are aligned to the first product's blocks; the second keeps that height."""
    _, n, k = weight.shape
    block_m = len(rows.token_of) // len(rows.expert_of)
    is_fp8 = w_scale is not None
    _grouped[triton.cdiv(n, blocks.block_n), len(rows.expert_of)](
        x, x_scale, weight.contiguous(), w_scale, out, rows.token_of, rows.expert_of, n, k,
        *((0, 0) if x_scale is None else x_scale.stride()),
        block_m=block_m, block_n=blocks.block_n, block_k=128 if is_fp8 else blocks.block_k,
        gathers=gathers, is_fp8=is_fp8,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
