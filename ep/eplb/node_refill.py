"""Between leaving experts where they are and balancing all over again: some nodes are filled anew,
the heaviest first, with the groups of experts that they have, or after groups have changed places
between nodes."""

from collections.abc import Iterator

import numpy as np

from ep.eplb.balance import fill_nodes
from ep.eplb.balancedness import Load, Slots, balancedness_of, rank_loads
from ep.eplb.local_search import Stage
from ep.eplb.rank_loads import RankLoads, Rows
from ep.eplb.rank_names import keep_ranks, new_by_rank
from ep.eplb.swap import best_swap

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
    # One after the other [Y, ...], and all filled at once [T * Y, ...]: that takes hardly longer.
    swapped = list(_swapped_groups(groups, load))
    old, loads = (np.concatenate([each] * len(swapped)) for each in (slots, load))
    new = fill_nodes(loads, np.concatenate(swapped), slots.shape[1], slots.shape[2])
    new = keep_ranks(old, new, num_nodes)
    # What a node has is on no other: its ranks' loads and moves do not depend on the others.
    shape = (len(rows), num_nodes, -1)
    loads_now = rank_loads(slots, load).reshape(shape)
    for after, filled in zip(swapped, np.split(new, len(swapped)), strict=True):
        loads_then = rank_loads(filled, load).reshape(shape)
        moves = new_by_rank(slots, filled).reshape(shape).sum(axis=2)
        # Nodes with other groups than today come first: one cannot change without the other.
        changed = (np.sort(after, axis=2) != np.sort(groups, axis=2)).any(axis=2)
        order = np.argsort(-np.where(changed, np.inf, loads_now.max(axis=2)), axis=1, kind="stable")
        place = np.argsort(order, axis=1)
        for count in range(1, num_nodes + 1):
            taken = (place < count) | changed
            by_rank = np.repeat(taken, loads_now.shape[2], axis=1)
            yield Stage(
                rows=rows,
                slots=np.where(by_rank[..., None], filled, slots),
                num_moves=np.where(taken, moves, 0).sum(axis=1),
                balancedness=balancedness_of(
                    np.where(taken[..., None], loads_then, loads_now).reshape(len(rows), -1)
                ),
            )


def _swapped_groups(groups: Slots, load: Load) -> Iterator[Slots]:
    """[Y, nodes, groups / nodes]: as they are, and after trades of the heaviest node's."""
    num_groups = groups[0].size
    books = RankLoads(groups, load.reshape(len(load), num_groups, -1).sum(axis=2), limit=1)
    for _ in range(MAX_GROUP_TRADES):
        yield books.slots.copy()
        swap = best_swap(books)
        gains = swap.gain > 0
        if not gains.any():
            return
        swap.apply(books, gains)
        books.recount()
    yield books.slots


def groups_of_nodes(
    slots: Slots, num_logical: int, num_nodes: int, num_groups: int
) -> tuple[Slots, Rows]:
    """Groups [Y, nodes, groups / nodes] of the Y layers that have them whole on one node each,
    and which layers these are."""
    num_layers = len(slots)
    node_slots = slots.reshape(num_layers, num_nodes, -1)
    layer, node = np.arange(num_layers)[:, None, None], np.arange(num_nodes)[None, :, None]
    has = np.zeros((num_layers, num_nodes, num_groups + 1), dtype=np.bool_)
    # EMPTY falls into the group after the last one.
    group = np.where(node_slots < 0, num_groups, node_slots * num_groups // num_logical)
    has[layer, node, group] = True
    has = has[..., :-1]
    whole = (has.sum(axis=1) == 1).all(axis=1)
    whole &= (has.sum(axis=2) == num_groups // num_nodes).all(axis=1)
    rows = np.flatnonzero(whole)
    found = np.nonzero(has[rows])[2].reshape(len(rows), num_nodes, num_groups // num_nodes)
    return found, rows
