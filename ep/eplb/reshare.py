"""One more replica of an expert, in place of one of another expert that has several.

best_reshare     of an expert of the heaviest rank: makes that rank lighter
fairest_reshare  of the expert whose replicas are heaviest: makes ranks lighter only in the long
                 run, when others have been traded
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load
from ep.eplb.rank_loads import RankLoads, Rows, pick

# So many of the heaviest rank's experts are tried, each in so many of the slots that can best be
# spared.
NUM_EXPERTS = 3
NUM_SPARE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshare:
    """One for each layer, [X] each.

    other, place  rank and slot that the replica goes to
    expert        of which
    gain          by how much the heaviest of all ranks (or the heaviest of both experts'
                  replicas) that become heavier or lighter is lighter than the heaviest was, as a
                  part of it; -inf where nothing is possible
    """

    other: Rows
    place: Rows
    expert: Rows
    gain: Load

    def num_moves(self, books: RankLoads) -> Rows:
        """[X] experts that travel: those that the ranks did not hold in the beginning."""
        rows = np.arange(len(self.other))
        moves: Rows = 1 - books.held_at_first[rows, self.expert, self.other].astype(np.int64)
        return moves

    def apply(self, books: RankLoads, chosen: npt.NDArray[np.bool_]) -> None:
        """Does those that are chosen, [X]; `books.recount` is to follow."""
        rows = np.flatnonzero(chosen)
        books.put(rows, self.other[rows], self.place[rows], self.expert[rows])


def best_reshare(books: RankLoads) -> Reshare:
    num_rows, num_ranks, num_slots = books.slots.shape
    rows = np.arange(num_rows)
    each = rows[:, None]
    heavy = books.total[rows, books.heaviest]
    grown, spared = _grown_experts(books), _spare_slots(books)  # [X, H], [X, K]
    rank, slot = np.divmod(spared, num_slots)
    lost = books.slots[each, rank, slot]  # [X, K]
    share, count = books.share, books.counts
    grown_share = books.load[each, grown] / (count[each, grown] + 1)
    lost_count = count[each, lost] - 1
    lost_share = np.divide(
        books.load[each, lost], lost_count, out=np.full(lost.shape, np.inf), where=lost_count > 0
    )
    lost_share = np.minimum(lost_share, 1e300)
    # Loads of the ranks that become lighter [X, H, R], heavier [X, K, R], and of that which has one
    # in place of the other [X, H, K]. One that holds both is taken for heavier than it is.
    lighter = _held_loads(books, grown, grown_share - share[each, grown])
    others = _held_loads(books, lost, lost_share - share[each, lost])
    np.put_along_axis(others, rank[..., None], 0.0, axis=2)
    there = pick(books.total, rank)[:, None] + grown_share[:, :, None]
    there = there - share[each, lost][:, None]
    peak = np.maximum(lighter.max(axis=2)[:, :, None], others.max(axis=2)[:, None])
    peak = np.maximum(peak, there)  # [X, H, K]
    has_it = books.has_no_room(grown[:, :, None], rank[:, None, :])
    same = grown[:, :, None] == lost[:, None, :]
    peak[has_it | same | (lost_count < 1)[:, None, :]] = np.inf
    best = peak.reshape(num_rows, -1).argmin(axis=1)
    which, spare = np.unravel_index(best, peak.shape[1:])
    return Reshare(
        other=rank[rows, spare],
        place=slot[rows, spare],
        expert=grown[rows, which],
        gain=1 - peak.reshape(num_rows, -1)[rows, best] / heavy,
    )


def fairest_reshare(books: RankLoads) -> Reshare:
    num_rows, num_ranks, num_slots = books.slots.shape
    rows = np.arange(num_rows)
    load, counts = books.load[:, :-1], books.counts[:, :-1]
    expert = books.share.argmax(axis=1)
    share = books.share[rows, expert]
    left = np.divide(load, counts - 1, out=np.full(load.shape, np.inf), where=counts > 1)
    lost = left.argmin(axis=1)
    flat = books.slots.reshape(num_rows, -1)
    # The lightest rank that has what is lost, and room for one of the expert.
    price = np.repeat(books.total, num_slots, axis=1)
    price[flat != lost[:, None]] = np.inf
    full = books.has_no_room(expert[:, None], np.arange(num_ranks)[None])
    price[np.repeat(full, num_slots, axis=1)] = np.inf
    best = price.argmin(axis=1)
    other, place = np.divmod(best, num_slots)
    grown_share = books.load[rows, expert] / (books.counts[rows, expert] + 1)
    gain = 1 - np.maximum(left[rows, lost], grown_share) / share
    gain[np.isinf(price[rows, best])] = -np.inf
    return Reshare(other=other, place=place, expert=expert, gain=gain)


def _held_loads(books: RankLoads, experts: Rows, more: Load) -> Load:
    """[X, N, R] of the ranks that hold `experts` [X, N], with `more` [X, N] for each; others 0."""
    held = books.held[np.arange(len(experts))[:, None], experts]
    loads: Load = np.where(held > 0, books.total[:, None] + held * more[..., None], 0.0)
    return loads


def _grown_experts(books: RankLoads) -> Rows:
    """[X, H]: what is heaviest on the heaviest rank."""
    rows = np.arange(len(books.slots))
    shares = books.slot_share[rows, books.heaviest]
    order = np.argsort(-shares, axis=1, kind="stable")[:, :NUM_EXPERTS]
    return books.slots[rows[:, None], books.heaviest[:, None], order]


def _spare_slots(books: RankLoads) -> Rows:
    """[X, K] indices into [R * S]: replicas of experts that have several, on light ranks first
    and of light experts."""
    count = pick(books.counts, books.slots)
    # A replica's load goes to the others of its kind.
    price = books.total[:, :, None] - books.slot_share
    price += books.slot_share / np.maximum(count - 1, 1)
    price[count == 1] = np.inf
    price = price.reshape(len(price), -1)
    if price.shape[1] <= NUM_SPARE:
        return np.broadcast_to(np.arange(price.shape[1]), price.shape)
    return np.sort(np.argpartition(price, NUM_SPARE, axis=1)[:, :NUM_SPARE], axis=1)
