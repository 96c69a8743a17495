"""Makes the heaviest rank lighter, step by step, in many independent layers at once.

A step is a trade of two experts or one more replica in place of another; of the two the one that
gains more for each expert that travels. Beside a trade, other ranks trade that are nearly as heavy.
Where neither makes the heaviest rank lighter, the heaviest expert gets a replica in place of the
one that can best be spared, from where trades may lead further down; where that is no gain either,
the layer is done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load, Slots, balancedness_of
from ep.eplb.rank_loads import RankLoads, Rows, pick
from ep.eplb.reshare import best_reshare, fairest_reshare
from ep.eplb.swap import best_swap, further_swaps

Mask = npt.NDArray[np.bool_]

# Steps that gain less are not worth taking, and might be rounding.
MIN_GAIN = 1e-6
# A step that takes an expert back to where it was costs nothing; it counts as a part of a move.
FREE = 0.25
# A layer that was no better by so much in so many steps is done.
LEAST, PATIENCE = 0.001, 6
# Layers that are done are dropped once so many are: it copies all books.
KEPT = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some layers after a step.

    rows          [Y] which layers
    slots         [Y, R, S]
    num_moves     [Y] experts that travel to get here from the beginning
    balancedness  [Y]
    """

    rows: Rows
    slots: Slots
    num_moves: Rows
    balancedness: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How to go down.

    limit      replicas of an expert a rank
    num_steps  at most
    even       a layer with this balancedness is done; one number for all, or one for each
    frugal     whether moves count
    few        a part of the layers so small is not waited for
    num_nodes  experts stay on the nodes that have them
    """

    limit: int
    num_steps: int
    even: float | Load
    frugal: bool = True
    few: float = 0.0
    num_nodes: int = 1


def descend(slots: Slots, load: Load, rules: Rules) -> Iterator[Stage]:
    """A stage a step, of the layers that are not done: `slots` [X, R, S], `load` [X, E] above 0."""
    books = RankLoads(slots, load, rules.limit, rules.num_nodes)
    rows = np.arange(len(slots))
    best = balancedness_of(books.total)
    best_step = np.zeros(len(rows), dtype=np.int64)
    only_swaps = np.zeros(len(rows), dtype=np.bool_)
    even = np.broadcast_to(np.asarray(rules.even, dtype=np.float64), best.shape)
    goes_on = best < even
    for step in range(1, rules.num_steps + 1):
        num_left = goes_on.sum()
        if num_left <= len(slots) * rules.few:
            return
        if num_left <= len(rows) * KEPT:
            books.keep(goes_on)
            rows, best, best_step = rows[goes_on], best[goes_on], best_step[goes_on]
            only_swaps, even = only_swaps[goes_on], even[goes_on]
            goes_on = np.ones_like(only_swaps)
        changed = _step(books, goes_on, only_swaps, rules.frugal)
        value = balancedness_of(books.total)
        yield Stage(
            rows=rows[goes_on],
            slots=books.placed(goes_on),
            num_moves=books.num_moves[goes_on],
            balancedness=value[goes_on],
        )
        is_better = value > best + LEAST
        best_step[is_better] = step
        best[is_better] = value[is_better]
        goes_on &= changed & (value < even) & (step - best_step < PATIENCE)


def _step(books: RankLoads, goes_on: Mask, only_swaps: Mask, frugal: bool) -> Mask:
    """[X]: where something was done, of those that go on. `only_swaps` [X], changed in place:
    after a replica that was no gain by itself come trades, as long as they gain; else it would be
    taken back."""
    swap, reshare = best_swap(books), best_reshare(books)
    swaps = goes_on & (swap.gain > MIN_GAIN)
    price = [np.maximum(step.num_moves(books), FREE) if frugal else 1 for step in (swap, reshare)]
    better = reshare.gain / price[1] > np.where(swaps, swap.gain / price[0], 0.0)
    better &= goes_on & (reshare.gain > MIN_GAIN) & ~only_swaps
    swaps &= ~better
    further = further_swaps(books, swap)
    if further is not None:
        level = (books.total.max(axis=1) + books.total.mean(axis=1)) / 2
        weight = pick(books.total, further.rank)
        lowers = (weight > level[:, None]) & (weight * (1 - further.gain) <= level[:, None])
        further.apply(books, lowers & swaps[:, None])
    swap.apply(books, swaps)
    reshare.apply(books, better)
    changed = swaps | better
    only_swaps &= swaps
    if (changed != goes_on).any():
        fairest = fairest_reshare(books)
        fairer = goes_on & ~changed & (fairest.gain > MIN_GAIN)
        fairest.apply(books, fairer)
        changed |= fairer
        only_swaps |= fairer
    books.recount()
    return changed
