"""How many rows may come to a rank at once, whatever the gate chooses: what is reserved for them.

Two bounds, both of them pure functions of what all ranks know. Tokens that arrive are bounded by
the tokens that all ranks send at once: past `ARRIVING_BYTES` all of them send in parts. Rows by
expert are bounded where they are made, by each rank for itself: the tokens that have arrived are
computed in as many parts as they need. Even loads are never cut by the second.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import Computed, DispatchedAligned
from kernels.build.aligned_rows import Permuted

Rest = TypeVar("Rest")

ARRIVING_BYTES = 8 << 30
# Rows of a rank, over those that it has when all experts are chosen equally often.
SKEW = 2
# Fewer are not worth a second part.
LEAST_ROWS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Which of the tokens that have arrived, and how many rows these become."""

    tokens: slice
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHandle(Generic[Rest]):
    """Of some of `num_tokens` that have arrived: row_of [K, n] of each choice, -1 for those that
    are elsewhere; weights [n, K] float32; `rest` is the same for all parts."""

    tokens: slice
    num_tokens: int
    row_of: torch.Tensor
    weights: torch.Tensor
    rest: Rest


def bounded(needs: DispatchNeeds, num_ranks: int) -> DispatchNeeds:
    """The same with both bounds, for a group of so many ranks."""
    most = ARRIVING_BYTES // (num_ranks * needs.hidden * needs.itemsize)
    num_parts = -(-needs.step_tokens // max(1, most))
    tokens = -(-needs.step_tokens // num_parts)
    return replace(
        needs,
        part_tokens=tokens if num_parts > 1 else 0,
        row_cap=max(SKEW * tokens * needs.num_choices, LEAST_ROWS),
    )


def row_parts(topk_idx: torch.Tensor, num_rows: int, cap: int) -> list[RowPart]:
    """Tokens in order, in parts of at most `cap` rows (0: any number), at least one.

    topk_idx  [R, K] integers of tokens that have arrived, negative: not here
    num_rows  that they become, which the host knows

    Waits for the device where one part will not do. ValueError for a cap below K.
    """
    num_tokens, num_choices = topk_idx.shape
    if not cap or num_rows <= cap:
        return [RowPart(tokens=slice(0, num_tokens), num_rows=num_rows)]
    if cap < num_choices:
        raise ValueError(f"a token may become {num_choices} rows, the cap is {cap}")
    # A token that lies across a mark goes to the part after it, whole.
    num_parts = -(-num_rows // (cap - num_choices + 1))
    until = (topk_idx >= 0).sum(1).cumsum(0)
    marks = torch.arange(1, num_parts, device=until.device) * num_rows // num_parts
    cuts = torch.searchsorted(until, marks, right=True)
    begins = until.new_zeros(num_tokens + 1)
    begins[1:] = until
    places, rows = torch.stack((cuts, begins[cuts])).tolist()
    places, rows = [0, *places, num_tokens], [0, *rows, num_rows]
    return [
        RowPart(tokens=slice(places[i], places[i + 1]), num_rows=rows[i + 1] - rows[i])
        for i in range(num_parts)
        if places[i + 1] > places[i]
    ]


def aligned_part(
    part: RowPart, permuted: Permuted, num_tokens: int, weights: torch.Tensor, rest: Rest
) -> DispatchedAligned:
    """`weights` [num_tokens, K] of all that have arrived, `permuted` of the part's alone."""
    return DispatchedAligned(
        hidden=permuted.rows,
        scales=permuted.scales,
        counts=permuted.counts,
        ends=permuted.ends,
        slot_of=permuted.expert_of,
        handle=PartHandle(
            tokens=part.tokens,
            num_tokens=num_tokens,
            row_of=permuted.row_of,
            weights=weights[part.tokens],
            rest=rest,
        ),
    )


def joined(
    computed: Iterable[Computed], of: Callable[[torch.Tensor, PartHandle[Rest]], torch.Tensor]
) -> tuple[torch.Tensor, Rest]:
    """`of(rows, handle)` [n, ...] for all parts, in order: [num_tokens, ...]; and the rest of their
    handles."""
    whole: torch.Tensor | None = None
    for rows, handle in computed:
        assert isinstance(handle, PartHandle), type(handle)
        part, rest = of(rows, handle), handle.rest
        if len(part) == handle.num_tokens:
            return part, rest
        if whole is None:
            whole = part.new_empty(handle.num_tokens, *part.shape[1:])
        whole[handle.tokens] = part
        del rows, part, handle  # there is no room for them beside the next
    assert whole is not None, "no part"
    return whole, rest
