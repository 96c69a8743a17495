"""Ranks are alike: a new placement may be dealt out to them so that they keep most of what they
hold, and keep it in the slots where it is."""

import numpy as np
import numpy.typing as npt

from ep.eplb.balancedness import Slots
from ep.eplb.rank_books import copies_by_rank
from ep.placement import EMPTY


def num_new(old: Slots, new: Slots) -> npt.NDArray[np.int64]:
    """[L] experts that ranks hold in `new` and not in `old`."""
    before, after = _held(old, new)
    counts: npt.NDArray[np.int64] = (after & ~before).sum(axis=(1, 2))
    return counts


def keep_ranks(old: Slots, new: Slots, num_nodes: int = 1) -> Slots:
    """`new` [L, R, S] with other names for the ranks: first for those that have most in common
    with one of `old`; ranks of a node stay together in a node, nodes keep their names."""
    num_layers, num_ranks, _ = new.shape
    before, after = _held(old, new)
    common = np.matmul(
        after.transpose(0, 2, 1).astype(np.float32), before.astype(np.float32)
    )  # [L, new rank, old rank]
    node = np.arange(num_ranks) * num_nodes // num_ranks
    common[:, node[:, None] != node] = -1
    named = np.empty_like(new)
    rows = np.arange(num_layers)
    for _ in range(num_ranks):
        best = common.reshape(num_layers, -1).argmax(axis=1)
        come_from, goes_to = np.divmod(best, num_ranks)
        named[rows, goes_to] = new[rows, come_from]
        common[rows, come_from] = -2
        common[rows, :, goes_to] = -2
    return named


def keep_slots(old: Slots, new: Slots) -> Slots:
    """`new` with the experts that a rank holds in `old` in the same slots, as far as it holds
    them in both; the others take the slots that are left, in order."""
    kept = new.copy()
    changed = np.argwhere((np.sort(old, axis=2) != np.sort(new, axis=2)).any(axis=2))
    same = np.ones(new.shape[:2], dtype=bool)
    same[tuple(changed.T)] = False
    kept[same] = old[same]
    for layer, rank in changed:
        before, coming = old[layer, rank], new[layer, rank].tolist()
        free = []
        for slot, expert in enumerate(before.tolist()):
            if expert in coming:
                coming.remove(expert)
                kept[layer, rank, slot] = expert
            else:
                free.append(slot)
        kept[layer, rank, free] = coming
    return kept


def _held(old: Slots, new: Slots) -> tuple[np.ndarray, np.ndarray]:
    """[L, E, R] bool, of both."""
    num_experts = int(max(old.max(initial=0), new.max(initial=0))) + 1
    return tuple(
        copies_by_rank(np.where(slots == EMPTY, num_experts, slots), num_experts + 1)[:, :-1] > 0
        for slots in (old, new)
    )  # type: ignore[return-value]
