"""The best placement that can be had for a number of moves; a move is a copy of an expert on a rank
that held none.

Each layer goes down its own path from today's placement (`local_search`); what the published
algorithm would do, with its ranks renamed to keep as much as possible, is one more candidate.
How far each layer goes is decided by what balancedness it gains for each of its moves, so that
moves go where they are worth most.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ep.eplb.balance import balance, is_hierarchical, spread_out
from ep.eplb.balancedness import Load, Slots, balancedness, balancedness_of, rank_loads
from ep.eplb.local_search import Rules, Stage, descend
from ep.eplb.node_refill import groups_of_nodes, refill
from ep.eplb.rank_names import keep_ranks, num_new

# Without a bound, a layer makes no more moves than it needs for so much of what is possible.
ENOUGH = 0.995
# Nodes are filled anew in layers that do not reach so much of what is possible.
REFILL = 0.98
# The last part of a layer this even is not waited for.
EVEN = 0.998
STEPS_PER_RANK = 4
FEW = 1 / 8  # so small a part of the layers is not waited for
# A choice this near to the best, as a part of it, is good enough.
NEAR = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """K stages of L layers; the first is today's placement. Not every layer has all K: the others
    are left at today's.

    num_moves     [K, L] from today's placement
    balancedness  [K, L]
    """

    stages: list[Stage]
    num_moves: npt.NDArray[np.int64]
    balancedness: Load

    @classmethod
    def of(cls, stages: list[Stage]) -> "Candidates":
        shape = (len(stages), len(stages[0].rows))
        num_moves = np.zeros(shape, dtype=np.int64)
        balancedness = np.tile(stages[0].balancedness, (len(stages), 1))
        for index, stage in enumerate(stages):
            num_moves[index, stage.rows] = stage.num_moves
            balancedness[index, stage.rows] = stage.balancedness
        return cls(stages=stages, num_moves=num_moves, balancedness=balancedness)

    def slots(self, choice: npt.NDArray[np.int64]) -> Slots:
        """[L, R, S] of one stage a layer, [L]."""
        chosen = self.stages[0].slots.copy()
        for index in np.unique(choice):
            stage = self.stages[index]
            places = choice[stage.rows] == index
            chosen[stage.rows[places]] = stage.slots[places]
        return chosen


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
    return found.slots(choice)


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
        few=FEW,
        num_nodes=num_nodes,
    )
    stages += descend(slots, spread_out(load), rules)
    best = stages[0].balancedness.copy()
    for stage in stages[2:]:
        best[stage.rows] = np.maximum(best[stage.rows], stage.balancedness)
    rest = np.flatnonzero(best < REFILL * stages[1].balancedness)
    if num_nodes > 1 and rest.size:
        for stage in refill(slots[rest], spread_out(load[rest]), num_nodes, num_groups):
            stages.append(replace(stage, rows=rest[stage.rows]))
    return Candidates.of(stages)


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
    that gains most for a move and still fits; where that may be far from the best, as it is with
    few layers, the best."""
    layers = np.arange(num_moves.shape[1])
    choice, left = _choose_while_all_fits(num_moves, value, budget)
    # Whatever else is chosen, no move gains more than the best one that is left.
    most = left * _rates(num_moves, value, choice)[0].max(initial=0.0)
    if most > NEAR * value[choice, layers].sum():
        return _choose_best(num_moves, value, budget)
    while True:
        rate, more = _rates(num_moves, value, choice)
        rate[more > left] = 0.0
        best = np.unravel_index(rate.argmax(), rate.shape)
        if not rate[best]:
            return choice
        left -= int(more[best])
        choice[best[1]] = best[0]


def _choose_best(
    num_moves: npt.NDArray[np.int64], value: Load, budget: int
) -> npt.NDArray[np.int64]:
    """As `choose`, the best of all: layer by layer, for every number of moves up to the budget."""
    num_layers = num_moves.shape[1]
    total = np.zeros(budget + 1)  # best value of the layers so far, by moves at most
    taken = np.zeros((num_layers, budget + 1), dtype=np.int64)
    for layer in range(num_layers):
        before, total = total, total + value[0, layer]
        for candidate in np.flatnonzero(value[:, layer] > value[0, layer]):
            moves = int(num_moves[candidate, layer])
            if moves > budget:
                continue
            reached = before[: budget + 1 - moves] + value[candidate, layer]
            better = reached > total[moves:]
            total[moves:][better] = reached[better]
            taken[layer, moves:][better] = candidate
    choice = np.zeros(num_layers, dtype=np.int64)
    for layer in reversed(range(num_layers)):
        choice[layer] = taken[layer, budget]
        budget -= int(num_moves[choice[layer], layer])
    return choice


def _choose_while_all_fits(
    num_moves: npt.NDArray[np.int64], value: Load, budget: int
) -> tuple[npt.NDArray[np.int64], int]:
    """What `choose` does up to its first change that does not fit, and the budget that is left.
    Until then layers do not depend on each other: each takes its changes in turn, and the best of
    all layers come first."""
    layers = np.arange(num_moves.shape[1])
    choice = np.zeros(len(layers), dtype=np.int64)
    changes = []  # (rate, moves, candidate, layer) of one change a layer
    last = np.full(len(layers), np.inf)
    while True:
        rate, more = _rates(num_moves, value, choice)
        best = rate.argmax(axis=0)
        gains = np.flatnonzero(rate[best, layers])
        if not gains.size:
            break
        chosen = best[gains]
        # No change comes before those that it builds on.
        last[gains] = np.minimum(last[gains], rate[chosen, gains])
        changes.append((last[gains], more[chosen, gains], chosen, gains))
        choice[gains] = chosen
    choice[:] = 0
    if not changes:
        return choice, budget
    rates, moves, candidates, where = map(np.concatenate, zip(*changes, strict=True))
    order = np.argsort(-rates, kind="stable")
    spent = np.cumsum(moves[order])
    fits = len(order) if spent.max() <= budget else int(np.argmax(spent > budget))
    for change in order[:fits]:  # of a layer the last one counts
        choice[where[change]] = candidates[change]
    return choice, budget - (int(spent[fits - 1]) if fits else 0)


def _rates(
    num_moves: npt.NDArray[np.int64], value: Load, choice: npt.NDArray[np.int64]
) -> tuple[Load, npt.NDArray[np.int64]]:
    """[K, L] gain for a move of changing each layer's choice, 0 for no gain; and the moves."""
    layers = np.arange(num_moves.shape[1])
    more = num_moves - num_moves[choice, layers]
    gain = value - value[choice, layers]
    return np.maximum(gain, 0.0) / np.maximum(more, 0.5), more
