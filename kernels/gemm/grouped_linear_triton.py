"""Triton path of `kernels.gemm.grouped_linear`: one kernel for the masked and the aligned layout.

The weights are the first operand of the matrix instruction, whose 64 rows they always fill, and the
tokens its second, of which there may be few: at decode, time goes with the bytes of the weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.build.aligned_rows import ALIGNMENT

BLOCK_N = 128


class GroupedShape(NamedTuple):
    """How a product is cut: rows and sums a tile, warps and pipeline stages a program."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def shape_for(expected_rows: int, dtype: torch.dtype) -> GroupedShape:
    block_m = min(128, max(16, triton.next_power_of_2(expected_rows)))
    block_k = 64 if dtype == torch.bfloat16 else 32
    return GroupedShape(block_m, block_k, 8 if block_m >= 128 else 4, 4)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _grouped_linear(
    x, weight, out, where, num_rows, num_experts, n, k,
    aligned: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(1) * block_m
    batch = tl.program_id(2).to(tl.int64)  # 0 unless masked
    if aligned:
        last_row = begin + block_m
        expert = tl.load(where + begin).to(tl.int64)
        if (expert < 0) | (expert >= num_experts):
            return
    else:
        last_row = tl.load(where + batch)
        expert = batch
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    index = tl.arange(0, block_k)
    is_column = column < n
    w_line = weight + (expert * n + column)[:, None] * k
    # Masked: programs share the rows of an expert, of which there are few as a rule.
    for first_row in range(begin, last_row, tl.num_programs(1) * block_m):
        row = first_row + tl.arange(0, block_m)
        is_row = row < last_row
        x_line = x + (batch * num_rows + row)[:, None] * k
        total = tl.zeros([block_n, block_m], tl.float32)
        for first in range(0, k, block_k):
            inside = first + index < k
            w_tile = tl.load(
                w_line + (first + index)[None, :],
                mask=is_column[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            x_tile = tl.load(
                x_line + (first + index)[None, :],
                mask=is_row[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(w_tile, tl.trans(x_tile), total, input_precision=precision)
        place = out + (batch * num_rows + row)[:, None] * n + column[None, :]
        result = tl.trans(total).to(out.dtype.element_ty)
        tl.store(place, result, mask=is_row[:, None] & is_column[None, :])


def masked(
    x: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor, expected_rows: int
) -> torch.Tensor:
    num_experts, capacity, _ = x.shape
    out = x.new_empty(num_experts, capacity, weight.shape[1])
    shape = shape_for(expected_rows, x.dtype)
    # One for what is expected, and one more: those after it loop.
    num_tiles = min(triton.cdiv(capacity, shape.block_m), expected_rows // shape.block_m + 2)
    _run(x, weight, out, counts, capacity, (num_tiles, num_experts), shape, aligned=False)
    return out


def aligned(x: torch.Tensor, expert_of: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    shape = shape_for(ALIGNMENT, x.dtype)
    num_tiles = triton.cdiv(len(x), shape.block_m)
    _run(x, weight, out, expert_of, len(x), (num_tiles, 1), shape, aligned=True)
    return out


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    where: torch.Tensor,
    num_rows: int,
    grid: tuple[int, int],
    shape: GroupedShape,
    *,
    aligned: bool,
) -> None:
    if not out.numel():
        return
    num_experts, n, k = weight.shape
    _grouped_linear[triton.cdiv(n, BLOCK_N), *grid](
        x, weight, out, where, num_rows, num_experts if aligned else None, n, k,
        aligned=aligned, block_m=shape.block_m, block_n=BLOCK_N, block_k=shape.block_k,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
