"""The published balancing of experts (DeepSeek's EPLB), for all layers at once, and a little more.

    hierarchical  groups of experts are packed into nodes; the experts of a node get replicas
                  there, and replicas are packed into the node's ranks
    global        the same with a single node

Replicas go, one after the other, to the expert with most load a replica; packing takes the
heaviest item first and gives it to the lightest rank with room. Two things are added to what was
published: a rank takes no second replica of an expert unless slots are more than experts, and
afterwards the heaviest rank trades experts with others as long as that makes it lighter.

Deterministic: equal loads go to the lower expert, and to the lower rank.
"""

import numpy as np

from ep.eplb.balancedness import Load, Slots, balancedness
from ep.eplb.descent import descend

MAX_STEPS = 48
EVEN = 0.9998


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
        return _fill(load, num_ranks, slots_per_rank)
    experts = _experts_of_nodes(load, num_nodes, num_groups)  # [L, nodes, E / nodes]
    flat = experts.reshape(num_layers, num_logical)
    own_load = np.take_along_axis(load, flat, axis=1).reshape(num_layers * num_nodes, -1)
    slots = _fill(own_load, num_ranks // num_nodes, slots_per_rank)  # indices within the node
    experts = experts.reshape(num_layers * num_nodes, -1)
    named = np.take_along_axis(experts, slots.reshape(len(slots), -1), axis=1)
    return named.reshape(num_layers, num_ranks, slots_per_rank)


def is_hierarchical(num_logical: int, num_ranks: int, num_nodes: int, num_groups: int) -> bool:
    return num_nodes > 1 and not (
        num_ranks % num_nodes or num_groups % num_nodes or num_logical % num_groups
    )


def spread_out(load: Load) -> Load:
    """The same with hardly anything added, so that replicas of what has no load are spread."""
    load = np.ascontiguousarray(load, dtype=np.float64)
    most = load.max(axis=1, keepdims=True, initial=0.0)
    return load + np.where(most > 0, most * 1e-12, 1.0)


def _experts_of_nodes(load: Load, num_nodes: int, num_groups: int) -> Slots:
    """[L, nodes, E / nodes]: whole groups, equally many a node."""
    num_layers, num_logical = load.shape
    group_size = num_logical // num_groups
    group_load = load.reshape(num_layers, num_groups, group_size).sum(axis=2)
    names = np.broadcast_to(np.arange(num_groups), group_load.shape)
    groups = _pack(names, group_load, num_nodes, limit=1)  # [L, nodes, groups / nodes]
    experts: Slots = groups[..., None] * group_size + np.arange(group_size)
    return experts.reshape(num_layers, num_nodes, -1)


def _fill(load: Load, num_ranks: int, slots_per_rank: int) -> Slots:
    """[X, R, S] of X independent problems [X, E]."""
    num_logical = load.shape[1]
    limit = -(-slots_per_rank // num_logical)
    counts = _replicate(load, num_ranks * slots_per_rank, num_ranks * limit)
    names = np.repeat(
        np.broadcast_to(np.arange(num_logical), load.shape).reshape(-1), counts.reshape(-1)
    ).reshape(len(load), -1)
    weight = np.take_along_axis(load / counts, names, axis=1)
    slots = _pack(names, weight, num_ranks, limit)
    best = balancedness(slots, load)
    for stage in descend(slots, load, limit=limit, num_steps=MAX_STEPS, even=EVEN):
        better = stage.balancedness > best[stage.rows]
        rows = stage.rows[better]
        slots[rows], best[rows] = stage.slots[better], stage.balancedness[better]
    return slots


def _replicate(load: Load, num_physical: int, most: int) -> Slots:
    """[X, E] replicas of each expert, at most `most`, `num_physical` in all."""
    counts = np.ones(load.shape, dtype=np.int64)
    rows = np.arange(len(load))
    share = load.copy()
    for _ in range(num_physical - load.shape[1]):
        expert = share.argmax(axis=1)
        counts[rows, expert] += 1
        count = counts[rows, expert]
        share[rows, expert] = np.where(count < most, load[rows, expert] / count, -1.0)
    return counts


def _pack(names: Slots, weight: Load, num_packs: int, limit: int) -> Slots:
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
    total = np.zeros((num_rows, num_packs))
    used = np.zeros((num_rows, num_packs), dtype=np.int64)
    copies = np.zeros((num_rows, int(names.max(initial=0)) + 1, num_packs), dtype=np.int8)
    packs = np.empty((num_rows, num_packs, room), dtype=np.int64)
    for item in range(num_items):
        name = names[:, item]
        held = copies[rows, name]
        # A copy too many costs more than any load, and a full pack more than that.
        cost = total + np.where(held >= limit, 1e150, 0.0)
        cost[used == room] = 1e300
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
