"""From a placement and a load to the next placement: all that a rebalance asks of EPLB."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ep.eplb.balance import balance
from ep.eplb.balancedness import Load, Slots, balancedness, slots_of
from ep.eplb.rank_names import keep_ranks, keep_slots, num_new
from ep.eplb.within_budget import rebalance
from ep.placement import Placement


def next_placement(
    placement: Placement,
    load: npt.ArrayLike,  # [L, E] tokens of each expert, not negative
    *,
    max_moves: int | None = None,
    layers: Sequence[int] | None = None,
    full: bool = False,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> Placement:
    """The placement to go to, with every expert that stays on its rank in its slot.

    A move is an expert that a rank comes to hold. By default as many are made as are worth it,
    with `max_moves` at most so many, in all layers together. `full` is the published algorithm,
    whatever moves it takes. Only `layers` (default: all) change. ValueError for a load of another
    shape, negative numbers, or layers that do not exist.
    """
    values = np.asarray(load, dtype=np.float64)
    if values.shape != (placement.num_layers, placement.num_logical):
        raise ValueError(
            f"load is {list(values.shape)}, not [{placement.num_layers}, {placement.num_logical}]"
        )
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("load must be finite and not negative")
    if full and max_moves is not None:
        raise ValueError("a full rebalance makes as many moves as it takes: give no bound")
    chosen = sorted(set(range(placement.num_layers) if layers is None else layers))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < placement.num_layers:
        raise ValueError(f"layers {chosen} are not all below {placement.num_layers}")
    if not chosen:
        return placement
    old = slots_of(placement)[chosen]
    if full:
        new = balance(
            values[chosen],
            num_ranks=placement.num_ranks,
            slots_per_rank=placement.slots_per_rank,
            num_nodes=num_nodes,
            num_groups=num_groups,
        )
        new = keep_ranks(old, new, num_nodes)
    else:
        new = rebalance(
            old, values[chosen], max_moves=max_moves, num_nodes=num_nodes, num_groups=num_groups
        )
    new = keep_slots(old, new).reshape(len(chosen), -1)
    return placement.with_layers(
        {layer: tuple(slots) for layer, slots in zip(chosen, new.tolist(), strict=True)}
    )


def layer_balancedness(placement: Placement, load: npt.ArrayLike) -> list[float]:
    """Of each MoE layer: mean over max of rank loads; 1 without load."""
    values: Load = np.asarray(load, dtype=np.float64)
    result: list[float] = balancedness(slots_of(placement), values).tolist()
    return result


def num_moves(old: Placement, new: Placement) -> list[int]:
    """Of each MoE layer: experts that ranks come to hold."""
    before, after = _of_one_shape(old, new)
    result: list[int] = num_new(before, after).tolist()
    return result


def _of_one_shape(old: Placement, new: Placement) -> tuple[Slots, Slots]:
    if not old.has_shape_of(new):
        raise ValueError("the placements are not of one shape")
    return slots_of(old), slots_of(new)
