"""Adds up how often each expert was chosen, on the device, without waiting for it.

    counts[e] += number of (t, k) with topk_idx[t, k] = e

topk_idx  [T, K] int64  logical experts
counts    [E]    int64  changed in place
"""

import torch

from kernels.build.operands import check_ids, check_operand


def count_experts(topk_idx: torch.Tensor, counts: torch.Tensor) -> None:
    """Raises ValueError for arguments that do not fit, and on a CPU for ids that are no experts."""
    check_operand("topk_idx", topk_idx, counts.device, torch.int64)
    check_operand("counts", counts, counts.device, torch.int64)
    if counts.dim() != 1:
        raise ValueError(f"counts must be [E], is {list(counts.shape)}")
    check_ids("topk_idx", topk_idx, 0, len(counts))
    chosen = topk_idx.reshape(-1)
    # Not bincount: on a GPU that reads its input's maximum back.
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
