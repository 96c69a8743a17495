"""Rows of tokens in a block of C rows for each expert: the input of a masked grouped GEMM.

    expert(t, k)   = topk_idx[t, k] - first, if that is one of 0 .. E - 1: else not here
    place(t, k)    = number of choices (t', k') of the same expert with t' K + k' < t K + k
    row_of[k, t]   = expert * C + place; -1 where it is not here
    rows[expert, place] = hidden[t]

    hidden     [T, H]          any dtype, columns contiguous; with FP8, `scale` [T, H / 128]
                               float32 travels along; `quantises`: it becomes FP8 on the way, as by
                               `kernels.elementwise.quantise`
    topk_idx   [T, K]          int32 or int64, columns contiguous; any that is no expert is not here
    rows       [E, C, H]       those from counts[e] on mean nothing
    row_of     [K, T]          int32
    counts     [E]             int32, rows of each expert
    scales     [E, C, H / 128] float32, rows contiguous (`kernels.build.fp8_scales`), or None

A token's choices are distinct, so that C = T is enough; what does not fit all the same is left out.
Exact (what is quantised: as `quantise` says). Nothing waits for the host on a GPU.
"""

import torch

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, INTEGERS, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import quantise_reference
from kernels.moe.masked_rows import MaskedRows, empty_masked


def permute_masked(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    first: int = 0,
    scale: torch.Tensor | None = None,
    quantises: bool = False,
) -> MaskedRows:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    check_operand("topk_idx", topk_idx, hidden.device, *INTEGERS)
    if not hidden.dim() == topk_idx.dim() == 2 or len(hidden) != len(topk_idx):
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit {tuple(topk_idx.shape)}")
    if hidden.stride(1) != 1 or topk_idx.stride(1) != 1:
        raise ValueError("the columns of hidden and of topk_idx must be contiguous")
    if quantises and (hidden.shape[1] % GROUP or scale is not None):
        raise ValueError(f"{tuple(hidden.shape)} cannot be quantised, or is already")
    if quantises:
        check_operand("hidden", hidden, hidden.device, *FLOATS)
    if scale is not None:
        shape = (len(hidden), hidden.shape[1] // GROUP)
        check_operand("scale", scale, hidden.device, torch.float32, shape=shape)
    if num_experts < 1 or capacity < 1 and len(hidden):
        raise ValueError(f"{num_experts} experts of {capacity} rows")
    if path_of("permute", hidden.device) == "triton":
        from kernels.moe.permute_masked_triton import launch

        return launch(hidden, topk_idx, num_experts, capacity, first, scale, quantises=quantises)
    if quantises:
        hidden, scale = quantise_reference(hidden)
    return permute_masked_reference(
        hidden, topk_idx, num_experts, capacity, first=first, scale=scale
    )


def permute_masked_reference(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    first: int = 0,
    scale: torch.Tensor | None = None,
) -> MaskedRows:
    out = empty_masked(hidden, topk_idx, num_experts, capacity, scale)
    out.row_of.fill_(-1)
    for expert in range(num_experts):
        token, choice = (topk_idx == first + expert).nonzero(as_tuple=True)
        token, choice = token[:capacity], choice[:capacity]
        count = len(token)
        out.counts[expert] = count
        out.rows[expert, :count] = hidden[token]
        if scale is not None and out.scales is not None:
            out.scales[expert, :count] = scale[token]
        numbers = torch.arange(count, dtype=torch.int32, device=hidden.device)
        out.row_of[choice, token] = numbers + expert * capacity
    return out
