"""Which rank holds what and how loaded it is, of many independent layers at once.

    slots          [X, R, S] int64    experts; N, after the last expert, for an empty slot
    load           [X, N + 1] float64 of each expert, above 0
    counts         [X, N + 1] int64   its replicas
    share          [X, N + 1] float64 load of each of them
    slot_share     [X, R, S] float64  load of the replica in each slot
    held           [X, N + 1, R] int16  replicas on each rank, at most `limit`
    held_at_first  [X, N + 1, R] bool   whether the rank held any in the beginning
    total          [X, R] float64     load of each rank
    num_moves      [X] int64          slots with experts that their ranks did not hold in the
                                      beginning: each copy travels

An empty slot is one more expert, without load, which is everywhere and never full.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Load, Slots
from ep.placement.placement import EMPTY

Rows = npt.NDArray[np.int64]
EVERYWHERE = 1 << 40
NEVER_FULL = -(1 << 14)


class RankLoads:
    """Owns what changes. `put`, then `recount`, keep it in step."""

    def __init__(
        self,
        slots: Slots,
        load: Load,
        limit: int,
        num_nodes: int = 1,
    ) -> None:
        """`slots` [X, R, S] with EMPTY ones, `load` [X, N]; experts stay on the nodes that have
        them."""
        num_rows, num_logical = load.shape
        self.slots = np.where(slots == EMPTY, num_logical, slots)
        self.load = np.concatenate((load, np.zeros((num_rows, 1))), axis=1)
        self.limit = limit
        self.node = np.arange(slots.shape[1]) * num_nodes // slots.shape[1]  # [R]
        self.num_nodes = num_nodes
        self.held = copies_by_rank(self.slots, num_logical + 1)
        self.counts = self.held.sum(axis=2, dtype=np.int64)
        self.held_at_first: npt.NDArray[np.bool_] = self.held.astype(np.bool_)
        self.held[:, -1] = NEVER_FULL
        self.held_at_first[:, -1] = True
        self.num_moves: Rows = np.zeros(num_rows, dtype=np.int64)
        self.counts[:, -1] = EVERYWHERE
        node_begins = np.flatnonzero(np.diff(self.node, prepend=-1))
        self.on_node: npt.NDArray[np.bool_] = (
            np.add.reduceat(self.held, node_begins, axis=2) != 0  # [X, N + 1, nodes]
        )
        self.recount()

    def placed(self, rows: npt.NDArray[np.bool_]) -> Slots:
        """[Y, R, S] of some layers [X], with EMPTY ones: a copy."""
        slots = self.slots[rows]
        return np.where(slots == self.load.shape[1] - 1, EMPTY, slots)

    def recount(self) -> None:
        """Loads from scratch, so that rounding does not add up."""
        self.share = self.load / self.counts
        self.slot_share = pick(self.share, self.slots)
        self.total = self.slot_share.sum(axis=2)
        self.heaviest: Rows = self.total.argmax(axis=1)

    def lightest(self, count: int) -> Rows:
        """[X, count] ranks on the node of the heaviest, or all of them, lightest first."""
        node_ranks = self.total.shape[1] // self.num_nodes
        first = self.heaviest[:, None] // node_ranks * node_ranks
        total = pick(self.total, first + np.arange(node_ranks))
        lightest: Rows = first + np.argsort(total, axis=1, kind="stable")[:, :count]
        return lightest

    def is_full(self, expert: Rows, rank: Rows) -> npt.NDArray[np.bool_]:
        """Whether ranks (broadcast with experts to [X, ...]) have enough replicas."""
        rows = np.arange(len(self.slots)).reshape(-1, *(1,) * (max(expert.ndim, rank.ndim) - 1))
        full: npt.NDArray[np.bool_] = self.held[rows, expert, rank] >= self.limit
        return full

    def has_no_room(self, expert: Rows, rank: Rows) -> npt.NDArray[np.bool_]:
        """Whether ranks may not take a replica more: they are full, or their node has none."""
        full = self.is_full(expert, rank)
        if self.num_nodes > 1:
            rows = np.arange(len(self.slots)).reshape(-1, *(1,) * (full.ndim - 1))
            full |= ~self.on_node[rows, expert, self.node[rank]]
        return full

    def put(self, rows: Rows, rank: Rows, slot: Rows, expert: Rows) -> None:
        """`expert[i]` takes the place of what is in a slot of layer `rows[i]`, each rank once. Of
        several in a layer, as many of an expert come as go in two calls together."""
        before = self.slots[rows, rank, slot]
        self.held[rows, before, rank] -= 1
        self.counts[rows, before] -= 1
        gone = ~self.held_at_first[rows, before, rank]
        come = ~self.held_at_first[rows, expert, rank]
        more = come.astype(np.int64) - gone
        self.num_moves += np.bincount(rows, more, len(self.slots)).astype(np.int64)
        self.slots[rows, rank, slot] = expert
        self.held[rows, expert, rank] += 1
        self.counts[rows, expert] += 1

    def keep(self, rows: npt.NDArray[np.bool_]) -> None:
        """Drops the other layers, [X]."""
        for name in ("slots", "load", "counts", "held", "held_at_first", "on_node", "num_moves"):
            setattr(self, name, getattr(self, name)[rows])
        self.recount()


def pick(values: npt.NDArray[Any], index: Rows) -> npt.NDArray[Any]:
    """values [X, N], index [X, ...] into N -> [X, ...] (`np.take_along_axis`, but quick)."""
    num_rows, width = values.shape
    base = np.arange(0, num_rows * width, width).reshape(-1, *(1,) * (index.ndim - 1))
    return values.reshape(-1).take(index + base)


def copies_by_rank(slots: Slots, num_experts: int) -> npt.NDArray[np.int16]:
    """[X, num_experts, R] from [X, R, S]."""
    num_rows, num_ranks, _ = slots.shape
    row, rank = np.arange(num_rows)[:, None, None], np.arange(num_ranks)[None, :, None]
    held = np.zeros((num_rows, num_experts, num_ranks), dtype=np.int16)
    np.add.at(held, (row, slots, rank), 1)
    return held
