"""Ranks are alike: a new placement may be dealt out to them so that they keep most of what they
hold."""

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Slots
from ep.eplb.rank_loads import copies_by_rank
from ep.placement.placement import EMPTY


def num_new(old: Slots, new: Slots) -> npt.NDArray[np.int64]:
    """[L] slots in `new` with experts that their ranks do not hold in `old`: each is a move."""
    counts: npt.NDArray[np.int64] = new_by_rank(old, new).sum(axis=1)
    return counts


def new_by_rank(old: Slots, new: Slots) -> npt.NDArray[np.int64]:
    """[L, R], the same of each rank."""
    num_layers, num_ranks, _ = new.shape
    layer, rank = np.arange(num_layers)[:, None, None], np.arange(num_ranks)[None, :, None]
    comes = ~_held(old, new)[layer, new, rank] & (new != EMPTY)
    counts: npt.NDArray[np.int64] = comes.sum(axis=2)
    return counts


def keep_ranks(old: Slots, new: Slots, num_nodes: int = 1) -> Slots:
    """`new` [L, R, S] with other names for the nodes, and for the ranks of each node: first for
    those that have most in common with one of `old`. Ranks of a node stay together."""
    num_layers, num_ranks, slots_per_rank = new.shape
    if num_nodes > 1:
        old_nodes, new_nodes = (each.reshape(num_layers, num_nodes, -1) for each in (old, new))
        anywhere = np.ones((num_nodes, num_nodes), dtype=np.bool_)
        new = _renamed(old_nodes, new_nodes, anywhere).reshape(new.shape)
    node = np.arange(num_ranks) * num_nodes // num_ranks
    return _renamed(old, new, node[:, None] == node)


def _renamed(old: Slots, new: Slots, may: npt.NDArray[np.bool_]) -> Slots:
    """`new` [L, N, S] in another order of N; `may[i, j]`: whether the i-th may become the j-th."""
    num_layers, num_names, _ = new.shape
    before = _held(old, new)
    # [L, new, old] experts in common.
    common = before[np.arange(num_layers)[:, None, None], new].sum(axis=2, dtype=np.int16)
    common[:, ~may] = -1
    named = np.empty_like(new)
    rows = np.arange(num_layers)
    for _ in range(num_names):
        best = common.reshape(num_layers, -1).argmax(axis=1)
        come_from, goes_to = np.divmod(best, num_names)
        named[rows, goes_to] = new[rows, come_from]
        common[rows, come_from] = -2
        common[rows, :, goes_to] = -2
    return named


def _held(slots: Slots, other: Slots) -> npt.NDArray[np.bool_]:
    """[L, E + 1, R] of `slots`, with room for the experts of both; the last one is EMPTY, which
    no rank holds."""
    num_experts = int(max(slots.max(initial=0), other.max(initial=0))) + 1
    held: npt.NDArray[np.bool_] = copies_by_rank(slots, num_experts + 1) > 0
    held[:, EMPTY] = False
    return held
