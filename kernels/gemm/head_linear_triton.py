"""Triton path of `head_linear`: a program a head, block of its rows and block of tokens.

The weights are the first operand of the matrix instruction, to which FP8 ones are converted in
registers: exactly, in bfloat16. Their scale is one number a program and step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class HeadLinearShape(NamedTuple):
    """Tokens and rows of a block; warps and pipeline stages of a program."""

    tokens: int
    block_n: int
    num_warps: int
    num_stages: int


def shape_for(num_tokens: int, n: int) -> HeadLinearShape:
    """As measured on an H200 for the two products of DeepSeek-V3."""
    tokens = min(128, max(16, triton.next_power_of_2(num_tokens)))
    if tokens <= 32:
        return HeadLinearShape(tokens, 64, 4, 3)
    if n > 128:
        return HeadLinearShape(tokens, 64, 4, 1)
    return HeadLinearShape(tokens, 128, 8, 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear(
    x, weight, scale, out, num_tokens, n, k, x_token_stride, x_head_stride, out_token_stride,
    out_head_stride,
    tokens: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * block_n
    row = first_row + tl.arange(0, block_n)
    token = tl.program_id(2) * tokens + tl.arange(0, tokens)
    index = tl.arange(0, group)
    is_token = token < num_tokens
    w_place = weight + (head * n + row)[:, None] * k + index[None, :]
    start = head * x_head_stride + token.to(tl.int64) * x_token_stride
    x_place = x + start[:, None] + index[None, :]
    num_groups = k // group
    scale_place = scale + (head * (n // group) + first_row // group) * num_groups
    total = tl.zeros([block_n, tokens], tl.float32)
    for number in range(num_groups):
        w_tile = tl.load(w_place + number * group).to(x.dtype.element_ty)
        x_tile = tl.load(x_place + number * group, mask=is_token[:, None], other=0.0)
        part = tl.dot(w_tile, tl.trans(x_tile), input_precision=precision)
        total += part * tl.load(scale_place + number)
    goal = head * out_head_stride + token.to(tl.int64) * out_token_stride
    place = out + goal[:, None] + row[None, :]
    tl.store(place, tl.trans(total).to(out.dtype.element_ty), mask=is_token[:, None])


def launch(
    x: torch.Tensor,  # [T, heads, K]
    weight: torch.Tensor,  # [heads, N, K] float8_e4m3fn
    scale: torch.Tensor | None,  # [heads, N / 128, K / 128]
    out: torch.Tensor | None,
    *,
    shape: HeadLinearShape | None = None,
) -> torch.Tensor:
    """`shape`: another than usual, to measure it."""
    num_tokens = x.shape[0]
    heads, n, k = weight.shape
    if out is None:
        out = x.new_empty(heads, num_tokens, n).transpose(0, 1)
    x = x if x.stride(2) == 1 else x.contiguous()
    assert out.stride(2) == 1, out.stride()
    if not num_tokens:
        return out
    shape = shape or shape_for(num_tokens, n)
    _head_linear[n // shape.block_n, heads, triton.cdiv(num_tokens, shape.tokens)](
        x, weight, scale, out, num_tokens, n, k, x.stride(0), x.stride(1), out.stride(0),
        out.stride(1), tokens=shape.tokens, block_n=shape.block_n, group=128,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out
