"""The best placement that can be had for a number of moves; a move is an expert that a rank comes
to hold.

Each layer goes down its own path from today's placement (`ep.eplb.descent`); what the published
algorithm would do, with its ranks renamed to keep as much as possible, is one more candidate.
How far each layer goes is decided by what balancedness it gains for each of its moves, so that
moves go where they are worth most.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ep.eplb.balance import balance, is_hierarchical, spread_out
from ep.eplb.balancedness import Load, Slots, balancedness, balancedness_of, rank_loads
from ep.eplb.descent import Rules, Stage, descend
from ep.eplb.node_refill import groups_of_nodes, refill
from ep.eplb.rank_names import keep_ranks, num_new

# Without a bound, a layer makes no more moves than it needs for so much of what is possible.
ENOUGH = 0.995
# Nobody waits for the last part of a layer this even.
EVEN = 0.998
STEPS_PER_RANK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """[K, L] each, of L layers; the first is today's placement. Not every layer has all K: the
    others are left at today's.

    slots         [K, L, R, S]
    num_moves     from today's placement
    balancedness
    """

    slots: Slots
    num_moves: npt.NDArray[np.int64]
    balancedness: Load


def rebalance(
    slots: Slots,  # [L, R, S], today's
    load: Load,  # [L, E], not negative
    *,
    max_moves: int | None = None,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> Slots:
    """[L, R, S]. With `max_moves` at most so many in all layers together, and the best found;
    else as many as are worth it. A layer never becomes worse. `num_nodes` and `num_groups` as for
    `balance`."""
    found = _candidates(slots, load, num_nodes, num_groups)
    if max_moves is None:
        best = found.balancedness.max(axis=0)
        enough = found.balancedness >= best * ENOUGH
        choice = np.where(enough, found.num_moves, found.num_moves.max() + 1).argmin(axis=0)
    else:
        choice = choose(found.num_moves, found.balancedness, max_moves)
    chosen: Slots = found.slots[choice, np.arange(len(slots))]
    return chosen


def _candidates(slots: Slots, load: Load, num_nodes: int, num_groups: int) -> Candidates:
    num_layers, num_ranks, slots_per_rank = slots.shape
    if not is_hierarchical(load.shape[1], num_ranks, num_nodes, num_groups):
        num_nodes = num_groups = 1
    full = balance(
        load,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        num_nodes=num_nodes,
        num_groups=num_groups,
    )
    full = keep_ranks(slots, full, num_nodes)
    layers = np.arange(num_layers)
    stages = [
        Stage(
            rows=layers,
            slots=placed,
            num_moves=num_new(slots, placed),
            balancedness=balancedness(placed, load),
        )
        for placed in (slots, full)
    ]
    rules = Rules(
        limit=-(-slots_per_rank // load.shape[1]),
        num_steps=STEPS_PER_RANK * num_ranks,
        even=_even_enough(slots, load, num_nodes, num_groups),
        num_nodes=num_nodes,
    )
    stages += descend(slots, spread_out(load), rules)
    best = stages[0].balancedness.copy()
    for stage in stages[2:]:
        best[stage.rows] = np.maximum(best[stage.rows], stage.balancedness)
    rest = np.flatnonzero(best < ENOUGH * stages[1].balancedness)
    if num_nodes > 1 and rest.size:
        for stage in refill(slots[rest], spread_out(load[rest]), num_nodes, num_groups):
            stages.append(replace(stage, rows=rest[stage.rows]))
    shape = (len(stages), num_layers)
    found = Candidates(
        slots=np.repeat(slots[None], len(stages), axis=0),
        num_moves=np.zeros(shape, dtype=np.int64),
        balancedness=np.repeat(stages[0].balancedness[None], len(stages), axis=0),
    )
    for index, stage in enumerate(stages):
        found.slots[index, stage.rows] = stage.slots
        found.num_moves[index, stage.rows] = stage.num_moves
        found.balancedness[index, stage.rows] = stage.balancedness
    return found


def _even_enough(slots: Slots, load: Load, num_nodes: int, num_groups: int) -> Load:
    """[L] balancedness beyond which nothing is to be had as long as experts stay on their nodes."""
    enough = np.full(len(slots), EVEN)
    if num_nodes > 1:
        _, rows = groups_of_nodes(slots, load.shape[1], num_nodes, num_groups)
        node_ranks = slots.shape[1] // num_nodes
        loads = rank_loads(slots[rows], load[rows]).reshape(len(rows), num_nodes, node_ranks)
        enough[rows] *= balancedness_of(loads.sum(axis=2))
    return enough


def choose(
    num_moves: npt.NDArray[np.int64],  # [K, L], 0 in the first row
    value: Load,  # [K, L]
    budget: int,
) -> npt.NDArray[np.int64]:
    """[L] candidates with at most `budget` moves in all: again and again the change of one layer
    that gains most for a move and still fits."""
    layers = np.arange(num_moves.shape[1])
    choice = np.zeros(len(layers), dtype=np.int64)
    left = budget
    while True:
        more = num_moves - num_moves[choice, layers]
        gain = value - value[choice, layers]
        possible = (gain > 0) & (more <= left)
        rate = np.where(possible, gain / np.maximum(more, 0.5), 0.0)
        best = np.unravel_index(rate.argmax(), rate.shape)
        if not possible[best]:
            return choice
        left -= int(more[best])
        choice[best[1]] = best[0]
