"""Triton path of `kernels.fp8_gemm` and `kernels.fp8_grouped_gemm`: one kernel for the dense, the
masked and the contiguous layout.

The weights are the first operand of the matrix instruction, whose 64 rows they always fill, and the
tokens its second, of which there may be few: at decode, time goes with the bytes of the weights.
"""

import torch
import triton
import triton.language as tl

from kernels.fp8_grouped_gemm import ALIGNMENT

BLOCK_N = 128  # one scale of the weights each
BLOCK_K = 128
DENSE, MASKED, CONTIGUOUS = 0, 1, 2


@triton.jit
def _fp8_gemm(
    x, x_scale, weight, w_scale, out, counts, num_rows, n, k,
    x_scale_expert_stride, x_scale_row_stride, x_scale_group_stride,
    layout: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(1) * block_m
    batch = tl.program_id(2).to(tl.int64)  # 0 unless masked
    expert, last_row = batch, num_rows
    if layout == 1:
        last_row = tl.load(counts + batch)
    if layout == 2:
        expert = tl.load(counts + first_row).to(tl.int64)
    if first_row >= last_row or expert < 0:
        return
    row = first_row + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    index = tl.arange(0, block_k)
    num_groups = k // block_k
    x_place = x + (batch * num_rows + row)[:, None] * k + index[None, :]
    w_place = weight + (expert * n + column)[:, None] * k + index[None, :]
    x_scale_place = x_scale + batch * x_scale_expert_stride + row * x_scale_row_stride
    w_scale_place = w_scale + (expert * tl.cdiv(n, block_n) + tl.program_id(0)) * num_groups
    is_row, is_column = row < last_row, column < n

    total = tl.zeros([block_n, block_m], tl.float32)
    for group in range(num_groups):
        w_tile = tl.load(w_place, mask=is_column[:, None], other=0.0)
        x_tile = tl.load(x_place, mask=is_row[:, None], other=0.0)
        factor = tl.load(x_scale_place, mask=is_row, other=0.0) * tl.load(w_scale_place + group)
        total += tl.dot(w_tile, tl.trans(x_tile)) * factor[None, :]
        x_place += block_k
        w_place += block_k
        x_scale_place += x_scale_group_stride
    out_place = out + (batch * num_rows + row)[:, None] * n + column[None, :]
    result = tl.trans(total).to(tl.bfloat16)
    tl.store(out_place, result, mask=is_row[:, None] & is_column[None, :])


def dense(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    _run(x[None], x_scale[None], weight[None], w_scale, out, None, DENSE, x.shape[0])
    return out


def masked(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    counts: torch.Tensor,
    expected_rows: int,
) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    _run(x, x_scale, weight, w_scale, out, counts, MASKED, expected_rows)
    return out


def contiguous(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    expert_of: torch.Tensor,
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    _run(x[None], x_scale[None], weight, w_scale, out, expert_of, CONTIGUOUS, ALIGNMENT)
    return out


def _run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    layout: int,
    expected_rows: int,
) -> None:
    """x [batches, rows, K]: one batch unless masked."""
    num_batches, num_rows, k = x.shape
    n = weight.shape[1]
    if not out.numel():
        return
    block_m = min(128, max(16, triton.next_power_of_2(expected_rows)))
    grid = (triton.cdiv(n, BLOCK_N), triton.cdiv(num_rows, block_m), num_batches)
    _fp8_gemm[grid](
        x, x_scale, weight, w_scale.contiguous(), out, counts, num_rows, n, k, *x_scale.stride(),
        layout=layout, block_m=block_m, block_n=BLOCK_N, block_k=BLOCK_K,
        num_warps=8 if block_m >= 128 else 4, num_stages=4 if block_m >= 64 else 5,
    )  # fmt: skip
