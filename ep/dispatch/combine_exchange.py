"""The results of gathered tokens' experts back to the ranks of the tokens, in fixed sizes.

exact       each rank returns the rows of a token's experts, unweighted, in order of choice, as
            many places a token as it could have experts; the token's rank adds them up. The
            bits are those of one rank with all experts, wherever they are; many bytes
partial     each rank returns one weighted sum a token, in the dtype of the rows; the token's
            rank adds those up in float32, in the order of the ranks. As many bytes as a
            reduce-scatter; the bits depend on where the experts are, and on nothing else
"""

from dataclasses import dataclass

import torch

from ep.group.group import EpGroup
from kernels.elementwise.combine import combine


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineExchange:
    """R ranks of T tokens each, of which this one's come back.

    own_idx      [T, K] integers, physical experts or -1
    own_weights  [T, K] float32
    one_of_each  as the function of this name makes it, where it is there already
    """

    own_idx: torch.Tensor
    own_weights: torch.Tensor
    one_of_each: tuple[torch.Tensor, torch.Tensor] | None = None


def to_return(
    rows: torch.Tensor,  # [M, H]
    row_of: torch.Tensor,  # [K, N] integers, the row of each choice that is here, else -1
    weights: torch.Tensor,  # [N, K] float32
    slots_per_rank: int,
    *,
    exact: bool,
) -> torch.Tensor:
    """What goes back of N gathered tokens: [N, H], or [N, places, H] if `exact`."""
    if not exact:
        return combine(rows, row_of, weights)
    return _unweighted(rows, row_of, min(len(row_of), slots_per_rank))


def exchange_and_combine(
    returned: torch.Tensor,  # of R T tokens, as `to_return` makes it
    way: CombineExchange,
    group: EpGroup,
    slots_per_rank: int,
    *,
    exact: bool,
    base: torch.Tensor | None = None,  # [T, H], added
) -> torch.Tensor:
    """[T, H] in the dtype of `returned`."""
    if not exact:
        received = _swap(returned, group)
        num_tokens = len(received) // group.size
        row_of, ones = way.one_of_each or one_of_each(group.size, num_tokens, returned)
        return combine(received, row_of, ones, base=base)
    received = _swap(returned.flatten(0, 1), group)
    row_of = _row_of_choice(way.own_idx, slots_per_rank, returned.shape[1])
    return combine(received, row_of, way.own_weights, base=base)


def one_of_each(
    num_ranks: int, num_tokens: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of [R, T] and weights [T, R] that add up the sums of all ranks, on the device of
    `like`."""
    numbers = torch.arange(num_ranks * num_tokens, dtype=torch.int32, device=like.device)
    ones = torch.ones(num_tokens, num_ranks, device=like.device)
    return numbers.view(num_ranks, num_tokens), ones


def _swap(rows: torch.Tensor, group: EpGroup) -> torch.Tensor:
    """Equally many rows to and from each rank."""
    received = torch.empty_like(rows)
    counts = [len(rows) // group.size] * group.size
    group.collectives.all_to_all(received, counts, rows, counts)
    return received


def _unweighted(rows: torch.Tensor, row_of: torch.Tensor, places: int) -> torch.Tensor:
    """[N, places, H]: the rows of each token's choices that are here, in order; what is in the
    places after them means nothing."""
    row_of = row_of.t().long()
    here = row_of >= 0
    place = torch.where(here, here.cumsum(1) - 1, places).clamp_max_(places)
    chosen = row_of.new_zeros(len(row_of), places + 1)
    chosen.scatter_(1, place, row_of)
    chosen = chosen[:, :places].clamp_min(0)
    if not len(rows):  # nothing is looked up in what is empty
        return rows.new_zeros(*chosen.shape, rows.shape[1])
    return rows.index_select(0, chosen.reshape(-1)).view(*chosen.shape, rows.shape[1])


def _row_of_choice(own_idx: torch.Tensor, slots_per_rank: int, places: int) -> torch.Tensor:
    """[K, T]: which received row each choice of our own tokens is, -1: none."""
    num_tokens, num_choices = own_idx.shape
    rank = torch.where(own_idx < 0, -1, own_idx.long() // slots_per_rank)
    same = (rank.unsqueeze(2) == rank.unsqueeze(1)).tril(-1)  # [T, K, K]: chosen before, there
    token = torch.arange(num_tokens, device=own_idx.device).unsqueeze(1)
    row = (rank * num_tokens + token) * places + same.sum(2)
    return torch.where(rank < 0, -1, row).t()
