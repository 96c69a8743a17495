"""More tokens than a dispatcher takes at once go through it in sub-steps, one after the other."""

from collections.abc import Callable

import torch

from ep.dispatch.token_caps import sub_steps


def in_sub_steps(
    through: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor],
    x: torch.Tensor,  # [T, H]
    tokens_per_rank: tuple[int, ...],  # T of every rank
    *,
    rank: int,
    cap: int,  # of a rank in a sub-step; 0: there is none
) -> torch.Tensor:
    """`through(x, tokens_per_rank)` [T, H], which works on each token by itself, called for at
    most `cap` tokens of each rank at a time. All ranks take equally many sub-steps, also those
    that have no tokens left."""
    if not cap or max(tokens_per_rank) <= cap:
        return through(x, tokens_per_rank)
    parts = []
    for by_rank in sub_steps(tokens_per_rank, cap):
        lengths = tuple(part.stop - part.start for part in by_rank)
        parts.append(through(x[by_rank[rank]], lengths))
    return torch.cat(parts)
