"""Between leaving experts where they are and balancing all over again: some nodes are filled anew,
the heaviest first, with the groups of experts that they have, or after groups have changed places
between nodes."""

from collections.abc import Iterator

import numpy as np

from ep.eplb.balance import fill_nodes
from ep.eplb.balancedness import Load, Slots, balancedness, rank_loads
from ep.eplb.descent import Stage
from ep.eplb.rank_books import RankBooks, Rows
from ep.eplb.rank_names import keep_ranks, num_new
from ep.eplb.trade import best_trade

MAX_GROUP_TRADES = 2


def refill(
    slots: Slots,  # [L, R, S], today's
    load: Load,  # [L, E], above 0
    num_nodes: int,
    num_groups: int,
) -> Iterator[Stage]:
    """Of the layers in which every node has whole groups, and equally many of them."""
    groups, rows = groups_of_nodes(slots, load.shape[1], num_nodes, num_groups)
    if not rows.size:
        return
    slots, load = slots[rows], load[rows]
    num_layers, num_ranks, slots_per_rank = slots.shape
    shape = (num_layers, num_nodes, -1, slots_per_rank)
    peak = rank_loads(slots, load).reshape(num_layers, num_nodes, -1).max(axis=2)
    books = RankBooks(groups, load.reshape(num_layers, num_groups, -1).sum(axis=2), limit=1)
    for _ in range(1 + MAX_GROUP_TRADES):
        new = keep_ranks(slots, fill_nodes(load, books.slots, num_ranks, slots_per_rank), num_nodes)
        # Nodes with other groups than today come first: one cannot change without the other.
        traded = (np.sort(books.slots, axis=2) != np.sort(groups, axis=2)).any(axis=2)
        order = np.argsort(-np.where(traded, np.inf, peak), axis=1, kind="stable")
        place = np.argsort(order, axis=1)
        for count in range(1, num_nodes + 1):
            taken = (place < count) | traded
            mixed = np.where(taken[..., None, None], new.reshape(shape), slots.reshape(shape))
            mixed = mixed.reshape(slots.shape)
            yield Stage(
                rows=rows,
                slots=mixed,
                num_moves=num_new(slots, mixed),
                balancedness=balancedness(mixed, load),
            )
        trade = best_trade(books)
        gains = trade.gain > 0
        if not gains.any():
            return
        trade.apply(books, gains)
        books.recount()


def groups_of_nodes(
    slots: Slots, num_logical: int, num_nodes: int, num_groups: int
) -> tuple[Slots, Rows]:
    """Groups [Y, nodes, groups / nodes] of the Y layers that have them whole on one node each,
    and which layers these are."""
    num_layers = len(slots)
    node_slots = slots.reshape(num_layers, num_nodes, -1)
    layer, node = np.arange(num_layers)[:, None, None], np.arange(num_nodes)[None, :, None]
    has = np.zeros((num_layers, num_nodes, num_groups + 1), dtype=np.bool_)
    # EMPTY falls into the group behind the last one.
    group = np.where(node_slots < 0, num_groups, node_slots * num_groups // num_logical)
    has[layer, node, group] = True
    has = has[..., :-1]
    whole = (has.sum(axis=1) == 1).all(axis=1)
    whole &= (has.sum(axis=2) == num_groups // num_nodes).all(axis=1)
    rows = np.flatnonzero(whole)
    found = np.nonzero(has[rows])[2].reshape(len(rows), num_nodes, num_groups // num_nodes)
    return found, rows
