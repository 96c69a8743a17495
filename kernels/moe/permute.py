"""Rows of tokens in the order of their experts, each expert's part aligned: the input of a
contiguous grouped GEMM.

    start[e]       = sum over e' < e of counts[e'] rounded up to `alignment`
    row_of[k, t]   = start[e] + number of choices (t', k') of e with t' K + k' < t K + k,
                     e = topk_idx[t, k]; -1 where that is -1
    rows[row_of[k, t]] = hidden[t]

    hidden     [T, H]       any dtype; with FP8, `scale` [T, H / 128] float32 travels along
    topk_idx   [T, K]       int64 local experts in 0 .. E - 1, or -1: not here; on a device the host
                            does not read them, and others count as -1
    rows       [M, H]       M = N + E (alignment - 1), rounded up; N is T K, or `most`: there are
                            no more choices here; any more are left out on a device
    row_of     [K, T]       int32
    counts     [E]          int32
    ends       [E]          int32, start[e] + counts[e]
    expert_of  [M]          int32, -1: padding, whose row holds nothing of use
    scales     [M, H / 128] float32 (`kernels.build.fp8_scales`), or None

Exact. Nothing waits for the host.
"""

import torch

from kernels.build.aligned_rows import Permuted, empty_permuted
from kernels.build.fp8_scales import GROUP
from kernels.build.operands import check_ids, check_operand
from kernels.build.paths import path_of


def permute(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    *,
    alignment: int = 128,
    scale: torch.Tensor | None = None,
    most: int | None = None,
) -> Permuted:
    """Raises ValueError for shapes, dtypes or devices that do not fit, and on a CPU for ids that
    are no experts."""
    check_operand("topk_idx", topk_idx, hidden.device, torch.int64)
    fits = hidden.dim() == topk_idx.dim() == 2 and len(hidden) == len(topk_idx)
    if not fits or not hidden.is_contiguous():
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit {tuple(topk_idx.shape)}")
    if num_experts < 1 or alignment < 1:
        raise ValueError(f"{num_experts} experts, rows aligned to {alignment}")
    if scale is not None:
        shape = (len(hidden), hidden.shape[1] // GROUP)
        check_operand("scale", scale, hidden.device, torch.float32, shape=shape)
    check_ids("topk_idx", topk_idx, -1, num_experts)
    if most is not None and topk_idx.is_cpu and int((topk_idx >= 0).sum()) > most:
        raise ValueError(f"more than {most} choices are here")
    if path_of("permute", hidden.device) == "triton":
        from kernels.moe.permute_triton import launch

        return launch(hidden, topk_idx, num_experts, alignment, scale, most)
    return permute_reference(
        hidden, topk_idx, num_experts, alignment=alignment, scale=scale, most=most
    )


def permute_reference(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    *,
    alignment: int = 128,
    scale: torch.Tensor | None = None,
    most: int | None = None,
) -> Permuted:
    permuted = empty_permuted(hidden, topk_idx, num_experts, alignment, scale, most)
    permuted.row_of.fill_(-1)
    permuted.expert_of.fill_(-1)
    start = 0
    for expert in range(num_experts):
        token, choice = (topk_idx == expert).nonzero(as_tuple=True)
        stop = start + len(token)
        permuted.counts[expert] = len(token)
        permuted.ends[expert] = stop
        permuted.rows[start:stop] = hidden[token]
        if scale is not None and permuted.scales is not None:
            permuted.scales[start:stop] = scale[token]
        permuted.expert_of[start:stop] = expert
        numbers = torch.arange(start, stop, dtype=torch.int32, device=hidden.device)
        permuted.row_of[choice, token] = numbers
        start += -(-len(token) // alignment) * alignment
    return permuted
