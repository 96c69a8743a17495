"""Which replica of its experts each token goes to.

    replica[t, k]  = (t + k + first) mod num_replicas[topk_idx[t, k]]
    out[t, k]      = physical[topk_idx[t, k], replica[t, k]]

An expert's tokens are dealt out to its replicas in turn; replicas hold equal weights, so that it
does not matter for a token which one it gets. `first` differs from rank to rank, so that ranks
with few tokens do not all choose the same replicas.

topk_idx      [T, K] int64  logical experts
physical      [E, R] int64  physical ids; columns from num_replicas on are not read
num_replicas  [E]    int64  1 .. R
out           [T, K] int64
"""

import torch

from kernels.build.operands import check_contiguous, check_ids, check_operand


def choose_replica(
    topk_idx: torch.Tensor, physical: torch.Tensor, num_replicas: torch.Tensor, first: int
) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, and on a CPU for ids that are no experts."""
    check_replicas(physical, num_replicas, topk_idx.device)
    check_operand("topk_idx", topk_idx, topk_idx.device, torch.int64)
    if topk_idx.dim() != 2 or first < 0:
        raise ValueError(f"topk_idx {tuple(topk_idx.shape)}, first replica {first}")
    check_ids("topk_idx", topk_idx, 0, len(physical))
    max_replicas = physical.shape[1]
    if max_replicas == 1:
        return physical[:, 0][topk_idx]
    num_tokens, num_choices = topk_idx.shape
    turn = torch.arange(first, first + num_tokens, device=topk_idx.device).unsqueeze(1)
    turn = turn + torch.arange(num_choices, device=topk_idx.device)
    turn.remainder_(num_replicas[topk_idx])
    return physical.view(-1)[turn.add_(topk_idx, alpha=max_replicas)]


def check_replicas(
    physical: torch.Tensor, num_replicas: torch.Tensor, device: torch.device
) -> None:
    """Raises ValueError for tables that do not fit together, or are not on `device`."""
    check_operand("physical", physical, device, torch.int64)
    if physical.dim() != 2 or not physical.numel():
        raise ValueError(f"physical must be [E, R], is {list(physical.shape)}")
    check_operand("num_replicas", num_replicas, device, torch.int64, shape=physical.shape[:1])
    check_contiguous(physical=physical, num_replicas=num_replicas)
    check_ids("num_replicas", num_replicas, 1, physical.shape[1] + 1)
