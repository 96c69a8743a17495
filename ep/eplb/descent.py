"""Makes the heaviest rank lighter, step by step, in many independent layers at once.

A step is a trade of two experts or one more replica in place of another; of the two the one that
gains more for each expert that travels. Where neither makes the heaviest rank lighter, the heaviest
expert gets a replica in place of the one that can best be spared, from where trades may lead
further down; where that is no gain either, the layer is done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ep.eplb.balancedness import Load, Slots, balancedness_of
from ep.eplb.rank_books import RankBooks, Rows
from ep.eplb.reshare import best_reshare, fairest_reshare
from ep.eplb.trade import best_trade

# Steps that gain less are not worth taking, and might be rounding.
MIN_GAIN = 1e-6
# A step that takes an expert back to where it was costs nothing; it counts as a part of a move.
FREE = 0.25
# A layer that was no better for so many steps is done.
PATIENCE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some layers behind a step.

    rows          [Y] which layers
    slots         [Y, R, S]
    num_moves     [Y] experts that travel to get here from the beginning
    balancedness  [Y]
    """

    rows: Rows
    slots: Slots
    num_moves: Rows
    balancedness: Load


def descend(
    slots: Slots,  # [X, R, S]
    load: Load,  # [X, E], above 0
    *,
    limit: int,
    num_steps: int,
    even: float,
    num_nodes: int = 1,
) -> Iterator[Stage]:
    """A stage a step, of the layers that are not done; `limit` replicas of an expert a rank. A
    layer with a balancedness of `even` is done. Experts stay on the nodes that have them."""
    books = RankBooks(slots, load, limit, num_nodes)
    rows = np.arange(len(slots))
    best = balancedness_of(books.total)
    best_step = np.zeros(len(rows), dtype=np.int64)
    goes_on = best < even
    for step in range(1, num_steps + 1):
        if not goes_on.any():
            return
        if not goes_on.all():
            books.keep(goes_on)
            rows, best, best_step = rows[goes_on], best[goes_on], best_step[goes_on]
        changed = _step(books)
        value = balancedness_of(books.total)
        best_step[value > best] = step
        best = np.maximum(value, best)
        goes_on = changed & (value < even) & (step - best_step < PATIENCE)
        yield Stage(rows=rows, slots=books.placed, num_moves=books.num_moves(), balancedness=value)


def _step(books: RankBooks) -> np.ndarray:
    """[X] bool: where something was done."""
    trade = best_trade(books)
    trades = trade.gain > MIN_GAIN
    reshare = best_reshare(books)
    better = reshare.gain > MIN_GAIN
    better &= reshare.gain / np.maximum(reshare.num_moves(books), FREE) > np.where(
        trades, trade.gain / np.maximum(trade.num_moves(books), FREE), 0.0
    )
    trade.apply(books, trades & ~better)
    reshare.apply(books, better)
    changed = trades | better
    if not changed.all():
        fairest = fairest_reshare(books)
        fairer = ~changed & (fairest.gain > MIN_GAIN)
        fairest.apply(books, fairer)
        changed |= fairer
    books.recount()
    return changed
