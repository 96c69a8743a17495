"""The heaviest rank gives an expert and takes a lighter one: the trade after which the heavier of
the two ranks is lightest. Both are on the same node, so that experts stay on theirs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load
from ep.eplb.rank_loads import RankLoads, Rows, pick

# It trades with one of the lightest ranks: of so many at least, and of more where that does not
# take long, because ranks have few slots.
MIN_PARTNERS = 4
NUM_PAIRS = 1200
# A rank that trades besides the heaviest has at least so many pairs of slots to choose from.
FEWEST_PAIRS = 200
# Fewer such ranks are not worth looking for partners.
FEWEST_HEAVY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
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

    def num_moves(self, books: RankLoads) -> Rows:
        """[X] experts that travel: those that the ranks did not hold in the beginning."""
        rows = np.arange(len(self.rank))
        given = books.slots[rows, self.rank, self.slot]
        taken = books.slots[rows, self.other, self.place]
        moves: Rows = 2 - (
            books.held_at_first[rows, given, self.other].astype(np.int64)
            + books.held_at_first[rows, taken, self.rank]
        )
        return moves

    def apply(self, books: RankLoads, chosen: npt.NDArray[np.bool_]) -> None:
        """Does those that are chosen; `books.recount` is to follow."""
        rows = np.nonzero(chosen)[0]
        rank, slot, other, place = (
            each[chosen] for each in (self.rank, self.slot, self.other, self.place)
        )
        given, taken = books.slots[rows, rank, slot], books.slots[rows, other, place]
        books.put(rows, rank, slot, taken)
        books.put(rows, other, place, given)


def best_swap(books: RankLoads) -> Swap:
    num_slots = books.slots.shape[2]
    partners = books.lightest(max(MIN_PARTNERS, NUM_PAIRS // num_slots**2))
    found = _best_swaps(books, books.heaviest[:, None], partners[:, None])
    return Swap(
        **{name: getattr(found, name)[:, 0] for name in ("rank", "slot", "other", "place", "gain")}
    )


def further_swaps(books: RankLoads, first: Swap) -> Swap | None:
    """[X, H] of other ranks than those of the `first` one of each layer, [X], and each rank in one
    of them at most: the heaviest of each node, each with a few of the lightest there. None where
    ranks are too few, or have too few slots to choose from."""
    num_rows, num_ranks, num_slots = books.slots.shape
    num_nodes, node_ranks = books.num_nodes, num_ranks // books.num_nodes
    num_partners = -(-FEWEST_PAIRS // num_slots**2)
    num_heavy = node_ranks // (1 + num_partners)
    if num_heavy < FEWEST_HEAVY:
        return None
    by_node = books.total.reshape(num_rows, num_nodes, node_ranks)
    order = np.argsort(-by_node, axis=2, kind="stable")
    order += np.arange(num_nodes)[:, None] * node_ranks
    heavy = order[..., :num_heavy].reshape(num_rows, -1)
    # The lightest to the heaviest, and so on, in turn.
    light = order[..., ::-1][..., : num_heavy * num_partners]
    light = light.reshape(num_rows, num_nodes, num_partners, num_heavy).swapaxes(2, 3)
    light = light.reshape(num_rows, -1, num_partners)
    found = _best_swaps(books, heavy, light, first.other)
    found.gain[(heavy == first.rank[:, None]) | (heavy == first.other[:, None])] = -np.inf
    return found


def _best_swaps(books: RankLoads, heavy: Rows, partners: Rows, busy: Rows | None = None) -> Swap:
    """[X, H] of ranks `heavy` [X, H] with one each of `partners` [X, H, P], but for `busy` [X]."""
    num_rows, num_heavy, num_partners = partners.shape
    num_slots = books.slots.shape[2]
    rows = np.arange(num_rows)[:, None, None]
    mine, theirs = books.slots[rows[..., 0], heavy], books.slots[rows, partners]
    weight = pick(books.total, heavy)
    middle = (weight[..., None] + pick(books.total, partners)) / 2  # [X, H, P]
    # No rank trades with itself.
    no_partner = partners == heavy[..., None]
    if busy is not None:
        no_partner |= partners == busy[:, None, None]
    # The heavier of the two is left with the middle, and with as much as what is given less what
    # is taken differs from what it has beyond the middle. [X, H, S, P] and [X, H, P, S]
    given = (
        books.slot_share[rows[..., 0], heavy][..., None] - (weight[..., None] - middle)[:, :, None]
    )
    given[books.is_full(mine[..., None], partners[:, :, None])] = np.inf
    taken = books.slot_share[rows, partners]
    taken[books.is_full(theirs, heavy[..., None, None]) | no_partner[..., None]] = -np.inf
    left = given[..., None] - taken[:, :, None]
    np.abs(left, out=left)
    left += middle[:, :, None, :, None]
    left = left.reshape(num_rows, num_heavy, -1)
    best = left.argmin(axis=2)
    slot, partner, place = np.unravel_index(best, (num_slots, num_partners, num_slots))
    least = np.take_along_axis(left, best[..., None], axis=2)[..., 0]
    other = np.take_along_axis(partners, partner[..., None], axis=2)[..., 0]
    return Swap(rank=heavy, slot=slot, other=other, place=place, gain=1 - least / weight)
