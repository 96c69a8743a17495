"""The heaviest rank gives an expert and takes a lighter one: the trade after which the heavier of
the two ranks is lightest."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load
from ep.eplb.rank_books import RankBooks, Rows, pick

# It trades with one of the lightest ranks: of so many at least, and of more where that does not
# take long, because ranks have few slots.
MIN_PARTNERS = 4
NUM_PAIRS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """One for each layer, [X] each.

    rank, slot    of the heaviest rank
    other, place  rank and slot that it trades with
    gain          by how much the heavier of the two becomes lighter than the heaviest was, as a
                  part of it; -inf where no trade is possible
    """

    rank: Rows
    slot: Rows
    other: Rows
    place: Rows
    gain: Load

    def num_moves(self, books: RankBooks) -> Rows:
        """[X] experts that travel: those that the ranks did not hold in the beginning."""
        rows = np.arange(len(self.rank))
        given = books.slots[rows, self.rank, self.slot]
        taken = books.slots[rows, self.other, self.place]
        moves: Rows = 2 - (
            books.held_at_first[rows, given, self.other].astype(np.int64)
            + books.held_at_first[rows, taken, self.rank]
        )
        return moves

    def apply(self, books: RankBooks, chosen: npt.NDArray[np.bool_]) -> None:
        """Does those that are chosen, [X]; `books.recount` is to follow."""
        rows = np.flatnonzero(chosen)
        rank, slot, other, place = (
            each[rows] for each in (self.rank, self.slot, self.other, self.place)
        )
        given, taken = books.slots[rows, rank, slot], books.slots[rows, other, place]
        books.put(rows, rank, slot, taken)
        books.put(rows, other, place, given)


def best_trade(books: RankBooks) -> Trade:
    num_rows, num_ranks, num_slots = books.slots.shape
    rows = np.arange(num_rows)
    rank = books.heaviest
    partners = books.lightest(max(MIN_PARTNERS, NUM_PAIRS // num_slots**2))  # [X, P]
    heavy = books.total[rows, rank]
    mine = books.slots[rows, rank]  # [X, S]
    theirs = books.slots[rows[:, None], partners].reshape(num_rows, -1)  # [X, P * S]
    shape = (num_rows, num_slots, partners.shape[1], num_slots)
    moved = (
        books.slot_share[rows, rank][:, :, None]
        - books.slot_share[rows[:, None], partners].reshape(num_rows, 1, -1)
    ).reshape(shape)
    light = pick(books.total, partners)[:, None, :, None]
    after = np.maximum(heavy[:, None, None, None] - moved, light + moved)
    # With itself nobody trades.
    full = books.has_no_room(mine[:, :, None], partners[:, None, :])
    after[full | (partners == rank[:, None])[:, None, :]] = np.inf
    here = books.has_no_room(theirs, rank[:, None])
    after.transpose(0, 2, 3, 1)[here.reshape(num_rows, -1, num_slots)] = np.inf
    best = after.reshape(num_rows, -1).argmin(axis=1)
    slot, partner, place = np.unravel_index(best, shape[1:])
    left = after.reshape(num_rows, -1)[rows, best]
    return Trade(
        rank=rank, slot=slot, other=partners[rows, partner], place=place, gain=1 - left / heavy
    )
