"""What has to travel for one layer to change from one placement to another: a pure function.

Every rank computes the same moves, so that sender and receiver agree without a word. A slot that
changes is filled from the same rank if that holds the expert, else from the holder that has least
to send so far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ep.placement.placement import EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Contents of a slot that are to be in another one; ranks are equal for a copy in place."""

    source_rank: int
    source_slot: int
    rank: int
    slot: int

    @property
    def travels(self) -> bool:
        return self.source_rank != self.rank


def layer_moves(
    old: Sequence[int],  # [num_ranks * slots_per_rank], EMPTY where there is none
    new: Sequence[int],
    slots_per_rank: int,
) -> tuple[Move, ...]:
    """In order of (rank, slot) to be filled. ValueError when `new` has an expert that `old` has
    not, or another number of slots."""
    if len(old) != len(new) or len(new) % slots_per_rank:
        raise ValueError(f"placements of {len(old)} and {len(new)} slots do not match")
    holders: dict[int, list[tuple[int, int]]] = {}
    for physical, expert in enumerate(old):
        if expert != EMPTY:
            holders.setdefault(expert, []).append(divmod(physical, slots_per_rank))
    num_sent = [0] * (len(old) // slots_per_rank)
    moves: list[Move] = []
    for physical, expert in enumerate(new):
        if expert in (EMPTY, old[physical]):
            continue
        rank, slot = divmod(physical, slots_per_rank)
        if expert not in holders:
            raise ValueError(f"expert {expert} is nowhere in the old placement")
        source_rank, source_slot = min(
            holders[expert], key=lambda holder: (holder[0] != rank, num_sent[holder[0]], holder)
        )
        if source_rank != rank:
            num_sent[source_rank] += 1
        moves.append(Move(source_rank=source_rank, source_slot=source_slot, rank=rank, slot=slot))
    return tuple(moves)


def keep_in_place(old: Sequence[int], new: Sequence[int], slots_per_rank: int) -> tuple[int, ...]:
    """`new` with each rank's experts in the slots where they are in `old`, as far as the rank
    holds them already; the others take the slots that are left, in their order."""
    kept = list(new)
    for begin in range(0, len(new), slots_per_rank):
        slots = range(begin, begin + slots_per_rank)
        coming = list(new[begin : begin + slots_per_rank])
        free = []
        for slot in slots:
            if old[slot] in coming:
                kept[slot] = old[slot]
                coming.remove(old[slot])
            else:
                free.append(slot)
        for slot, expert in zip(free, coming, strict=True):
            kept[slot] = expert
    return tuple(kept)


def num_bytes_by_pair(moves: Iterable[Move], expert_bytes: int) -> dict[tuple[int, int], int]:
    """Bytes from rank to rank of what travels."""
    traffic: dict[tuple[int, int], int] = {}
    for move in moves:
        if move.travels:
            pair = (move.source_rank, move.rank)
            traffic[pair] = traffic.get(pair, 0) + expert_bytes
    return traffic
