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


def choose_replica(
    topk_idx: torch.Tensor, physical: torch.Tensor, num_replicas: torch.Tensor, first: int
) -> torch.Tensor:
    max_replicas = physical.shape[1]
    if max_replicas == 1:
        return physical[:, 0][topk_idx]
    num_tokens, num_choices = topk_idx.shape
    turn = torch.arange(first, first + num_tokens, device=topk_idx.device).unsqueeze(1)
    turn = turn + torch.arange(num_choices, device=topk_idx.device)
    turn.remainder_(num_replicas[topk_idx])
    return physical.view(-1)[turn.add_(topk_idx, alpha=max_replicas)]
