"""Which rows go where in a collective dispatch and combine: a pure function of the routing.

Every rank knows the experts of all tokens of the group, so that all of them compute matching
plans and no counts need to be sent. Rows are (owner rank, token, choice) triples. A rank works
on the rows of its experts, in order of (local expert, owner, token, choice); they return in
order of (owner, token, choice) and arrive in order of (expert's rank, token, choice).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """One rank's plan. T of its own tokens, K choices each, N rows for its experts, R ranks.

    gathered_row   [N] int64, padded position (rank * longest + token) of each expert row
    expert_counts  [slots_per_rank] int64, sums to N
    send_row       [N] int64, the expert row that each returned row is
    send_rows      R counts, returned rows by owner; sum to N
    receive_rows   R counts, rows that come back by expert's rank; sum to T * K
    row_of         [K, T] int64, the received row of each (choice, token)
    """

    gathered_row: Indices
    expert_counts: Indices
    send_row: Indices
    send_rows: list[int]
    receive_rows: list[int]
    row_of: Indices


def plan_routes(
    topk_idx: Indices,  # [R, longest, K], physical experts, rows past a rank's tokens ignored
    tokens_per_rank: tuple[int, ...],
    *,
    rank: int,
    slots_per_rank: int,
) -> Routes:
    """The plan of `rank`. Asserts that all experts lie in slots of the group."""
    num_ranks, longest, num_choices = topk_idx.shape
    token_owner, token_row = _tokens(tokens_per_rank)
    expert = topk_idx.reshape(num_ranks * longest, num_choices)[token_row].reshape(-1)
    expert_rank = expert // slots_per_rank
    assert not expert.size or (expert.min() >= 0 and expert_rank.max() < num_ranks)

    mine = np.flatnonzero(expert_rank == rank)
    local_expert = expert[mine] - rank * slots_per_rank
    counts = np.bincount(local_expert, minlength=slots_per_rank)
    by_expert = np.argsort(local_expert, kind="stable")
    token = mine // num_choices

    first_row = sum(tokens_per_rank[:rank]) * num_choices
    own_ranks = expert_rank[first_row : first_row + tokens_per_rank[rank] * num_choices]
    return Routes(
        gathered_row=token_row[token[by_expert]],
        expert_counts=counts.astype(np.int64, copy=False),
        send_row=_inverse(by_expert),
        send_rows=np.bincount(token_owner[token], minlength=num_ranks).tolist(),
        receive_rows=np.bincount(own_ranks, minlength=num_ranks).tolist(),
        row_of=_inverse(np.argsort(own_ranks, kind="stable")).reshape(-1, num_choices).T,
    )


@lru_cache(maxsize=64)  # the same in all layers of a step
def _tokens(tokens_per_rank: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Owner and padded position of each token of the group."""
    longest = max(tokens_per_rank)
    owner = np.repeat(np.arange(len(tokens_per_rank)), tokens_per_rank)
    first = np.cumsum((0, *tokens_per_rank[:-1]))
    return owner, owner * longest + np.arange(owner.size) - first[owner]


def _inverse(permutation: Indices) -> Indices:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(permutation.size)
    return inverse
