"""Adds up how often each expert was chosen, on the device, without waiting for it.

    counts[e] += number of (t, k) with topk_idx[t, k] = e

topk_idx  [T, K] int64  logical experts
counts    [E]    int64  changed in place
"""

import torch


def count_experts(topk_idx: torch.Tensor, counts: torch.Tensor) -> None:
    chosen = topk_idx.reshape(-1)
    # Not bincount: on a GPU that reads its input's maximum back.
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
