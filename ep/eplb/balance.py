"""The published balancing of experts (DeepSeek's EPLB), for all layers at once, and a little more.

    hierarchical  groups of experts are packed into nodes; the experts of a node get replicas
                  there, and replicas are packed into the node's ranks
    global        the same with a single node

Replicas go, one after the other, to the expert with most load a replica; packing takes the
heaviest item first and gives it to the lightest rank with room. Two things are added to what was
published: a rank takes no second replica of an expert unless slots are more than experts, and
afterwards the heaviest rank trades experts with others as long as that makes it lighter. Where the
result is no better than the published one, that is taken as it is.

Deterministic: equal loads go to the lower expert, and to the lower rank.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load, Slots, balancedness
from ep.eplb.local_search import Rules, descend

Floats = npt.NDArray[np.floating[Any]]

TOO_MANY = 1e30
MAX_STEPS = 48
EVEN = 0.9998
FEW = 1 / 30  # so small a part of the problems is not waited for


def balance(
    load: Load,  # [L, E], not negative
    *,
    num_ranks: int,
    slots_per_rank: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> Slots:
    """[L, R, S], every slot used. Hierarchical when the nodes divide ranks and groups, and the
    groups the experts; else global. ValueError for fewer slots than experts."""
    num_layers, num_logical = load.shape
    if num_ranks * slots_per_rank < num_logical:
        raise ValueError(f"{num_logical} experts in {num_ranks} x {slots_per_rank} slots")
    load = spread_out(load)
    if not is_hierarchical(num_logical, num_ranks, num_nodes, num_groups):
        return _fill(load, num_ranks, slots_per_rank, np.ones(num_layers))
    return fill_nodes(load, pack_groups(load, num_nodes, num_groups), num_ranks, slots_per_rank)


def is_hierarchical(num_logical: int, num_ranks: int, num_nodes: int, num_groups: int) -> bool:
    return num_nodes > 1 and not (
        num_ranks % num_nodes or num_groups % num_nodes or num_logical % num_groups
    )


def spread_out(load: Load) -> Load:
    """The same with hardly anything added, so that replicas of what has no load are spread."""
    load = np.ascontiguousarray(load, dtype=np.float64)
    most = load.max(axis=1, keepdims=True, initial=0.0)
    return load + np.where(most > 0, most * 1e-12, 1.0)


def pack_groups(load: Load, num_nodes: int, num_groups: int) -> Slots:
    """[L, nodes, groups / nodes]: groups of experts, equally many a node."""
    group_load = load.reshape(len(load), num_groups, -1).sum(axis=2)
    names = np.broadcast_to(np.arange(num_groups), group_load.shape)
    return _pack(names, group_load, num_nodes, limit=1)


def fill_nodes(
    load: Load,  # [L, E], above 0
    groups: Slots,  # [L, nodes, groups / nodes]
    num_ranks: int,
    slots_per_rank: int,
) -> Slots:
    """[L, R, S]: each node's ranks with the experts of its groups."""
    num_layers, num_logical = load.shape
    num_nodes = groups.shape[1]
    group_size = num_logical // groups[0].size
    experts: Slots = groups[..., None] * group_size + np.arange(group_size)
    flat = experts.reshape(num_layers, num_logical)
    own_load = np.take_along_axis(load, flat, axis=1).reshape(num_layers * num_nodes, -1)
    # The heaviest node's mean load is what its heaviest rank has at least; it does not matter
    # how even the others are below that.
    node_load = own_load.sum(axis=1).reshape(num_layers, num_nodes)
    enough = (node_load / node_load.max(axis=1, keepdims=True)).reshape(-1)
    # Indices within the node.
    slots = _fill(own_load, num_ranks // num_nodes, slots_per_rank, enough)
    experts = experts.reshape(num_layers * num_nodes, -1)
    named = np.take_along_axis(experts, slots.reshape(len(slots), -1), axis=1)
    return named.reshape(num_layers, num_ranks, slots_per_rank)


def _fill(load: Load, num_ranks: int, slots_per_rank: int, enough: Load) -> Slots:
    """[X, R, S] of X independent problems [X, E]; more balancedness than `enough` [X] is no use."""
    limit = -(-slots_per_rank // load.shape[1])
    names, share = _replicate(load, num_ranks * slots_per_rank, num_ranks * limit)
    slots = _pack(names, share, num_ranks, limit)
    best = balancedness(slots, load)
    rules = Rules(limit=limit, num_steps=MAX_STEPS, even=enough * EVEN, frugal=False, few=FEW)
    for stage in descend(slots, load, rules):
        better = stage.balancedness > best[stage.rows]
        rows = stage.rows[better]
        slots[rows], best[rows] = stage.slots[better], stage.balancedness[better]
    rest = np.flatnonzero(best < enough)
    if not rest.size:
        return slots
    published = _fill_as_published(load[rest], num_ranks, slots_per_rank)
    better = balancedness(published, load[rest]) > best[rest] * (1 + 1e-9)
    slots[rest[better]] = published[better]
    return slots


def _fill_as_published(load: Load, num_ranks: int, slots_per_rank: int) -> Slots:
    """With any number of replicas a rank, and in float32: packing is sensitive to rounding."""
    num_physical = num_ranks * slots_per_rank
    names, share = _replicate(load.astype(np.float32), num_physical, num_physical)
    return _pack(names, share, num_ranks, slots_per_rank)


def _replicate(load: Floats, num_physical: int, most: int) -> tuple[Slots, Floats]:
    """Experts [X, num_physical], first all of them, then the replicas, at most `most` of each;
    and the load of each replica."""
    num_rows, num_logical = load.shape
    rows = np.arange(num_rows)
    counts = np.ones(load.shape, dtype=np.int64)
    names = np.tile(np.arange(num_physical), (num_rows, 1))
    share = load.copy()
    for place in range(num_logical, num_physical):
        expert = share.argmax(axis=1)
        names[:, place] = expert
        counts[rows, expert] += 1
        count = counts[rows, expert]
        share[rows, expert] = np.where(count < most, load[rows, expert] / count, -1)
    shares = load / counts.astype(load.dtype)
    return names, np.take_along_axis(shares, names, axis=1)


def _pack(names: Slots, weight: Floats, num_packs: int, limit: int) -> Slots:
    """[X, packs, n / packs]: items [X, n], heaviest first, into the lightest pack with room.

    A pack takes at most `limit` of one name as long as another pack has room; `_untangle` mends
    the few cases where none had.
    """
    num_rows, num_items = names.shape
    room = num_items // num_packs
    rows = np.arange(num_rows)
    order = np.argsort(-weight, axis=1, kind="stable")
    names = np.take_along_axis(names, order, axis=1)
    weight = np.take_along_axis(weight, order, axis=1)
    total = np.zeros((num_rows, num_packs), dtype=weight.dtype)
    used = np.zeros((num_rows, num_packs), dtype=np.int64)
    copies = np.zeros((num_rows, int(names.max(initial=0)) + 1, num_packs), dtype=np.int16)
    packs = np.empty((num_rows, num_packs, room), dtype=np.int64)
    for item in range(num_items):
        name = names[:, item]
        held = copies[rows, name]
        # A copy too many costs more than any load, and a full pack more than that.
        cost = np.where(held >= limit, TOO_MANY, total)
        cost[used == room] = np.inf
        pack = cost.argmin(axis=1)
        packs[rows, pack, used[rows, pack]] = name
        used[rows, pack] += 1
        total[rows, pack] += weight[:, item]
        copies[rows, name, pack] += 1
    _untangle(packs, copies, limit)
    return packs


def _untangle(packs: Slots, copies: np.ndarray, limit: int) -> None:
    """Swaps copies beyond the limit into packs without them, in place."""
    for row in np.flatnonzero((copies > limit).any(axis=(1, 2))):
        for name, pack in np.argwhere(copies[row] > limit):
            while copies[row, name, pack] > limit and _swap_away(
                packs[row], copies[row], name, pack, limit
            ):
                pass


def _swap_away(packs: Slots, copies: np.ndarray, name: int, pack: int, limit: int) -> bool:
    """One copy of `name` leaves `pack` for the first item that may take its place."""
    for other in np.flatnonzero(copies[name] < limit):
        for place, item in enumerate(packs[other]):
            if copies[item, pack] < limit and item != name:
                packs[other, place] = name
                packs[pack, np.flatnonzero(packs[pack] == name)[0]] = item
                copies[name, pack] -= 1
                copies[item, other] -= 1
                copies[name, other] += 1
                copies[item, pack] += 1
                return True
    return False
