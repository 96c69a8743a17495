"""What a rebalance would change, cost and gain: pure functions of load and placement."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ep.eplb.balancedness import Load, balancedness, slots_of
from ep.migration.migration_moves import keep_in_place, layer_moves, num_bytes_by_pair
from ep.placement.placement import Placement

# A layer that gains less stays as it is.
MIN_GAIN = 1e-4
# Of each layer that changes, beside the time its experts travel: staging, agreeing, installing.
LAYER_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A group's experts as of a window: `tokens` [MoE layers, experts] in it, (token, choice)
    pairs of all ranks."""

    placement: Placement
    placement_version: int
    expert_bytes: int
    tokens: Load
    window_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One MoE layer (counted without the dense ones) that changes; slots as in `Placement`."""

    layer: int
    balancedness_before: float
    balancedness_after: float
    num_moves: int
    physical_to_logical: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePlan:
    """From `start` on. `traffic` is bytes by (source, destination) rank; balancedness is the mean
    over all MoE layers; `seconds` an estimate."""

    start: Placement
    placement_version: int
    layers: tuple[LayerPlan, ...]
    traffic: Mapping[tuple[int, int], int]
    seconds: float
    balancedness_before: float
    balancedness_after: float

    @property
    def num_moves(self) -> int:
        """Experts that travel between ranks."""
        return sum(layer.num_moves for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(self.traffic.values())

    @property
    def changes(self) -> dict[int, tuple[int, ...]]:
        """What `Placement.with_layers` takes."""
        return {layer.layer: layer.physical_to_logical for layer in self.layers}


def plan_of(
    experts: Experts, target: Placement, bytes_per_second: float, *, only_gains: bool
) -> RebalancePlan:
    """What it takes to get to `target`; with `only_gains` without the layers that gain nothing.
    ValueError for a target of another shape. Each rank sends `bytes_per_second` at most."""
    now = experts.placement
    if not target.has_shape_of(now):
        raise ValueError("the placement is for a group of another shape")
    before = balancedness(slots_of(now), experts.tokens)
    after = balancedness(slots_of(target), experts.tokens)
    layers: list[LayerPlan] = []
    traffic: dict[tuple[int, int], int] = {}
    for layer, (old, new) in enumerate(
        zip(now.physical_to_logical, target.physical_to_logical, strict=True)
    ):
        kept = keep_in_place(old, new, now.slots_per_rank)
        if kept == old or (only_gains and after[layer] - before[layer] < MIN_GAIN):
            after[layer] = before[layer]
            continue
        moves = layer_moves(old, kept, now.slots_per_rank)
        for pair, num_bytes in num_bytes_by_pair(moves, experts.expert_bytes).items():
            traffic[pair] = traffic.get(pair, 0) + num_bytes
        layers.append(
            LayerPlan(
                layer=layer,
                balancedness_before=float(before[layer]),
                balancedness_after=float(after[layer]),
                num_moves=sum(move.travels for move in moves),
                physical_to_logical=kept,
            )
        )
    return RebalancePlan(
        start=now,
        placement_version=experts.placement_version,
        layers=tuple(layers),
        traffic=traffic,
        seconds=_seconds(traffic, len(layers), bytes_per_second),
        balancedness_before=mean(before),
        balancedness_after=mean(after),
    )


def mean(values: Load) -> float:
    """1 where there are none."""
    return float(np.mean(values)) if values.size else 1.0


def _seconds(
    traffic: Mapping[tuple[int, int], int], num_layers: int, bytes_per_second: float
) -> float:
    """The rank that sends or receives most, and what each layer takes besides."""
    by_rank: dict[tuple[str, int], int] = {}
    for (source, destination), num_bytes in traffic.items():
        for key in (("sends", source), ("receives", destination)):
            by_rank[key] = by_rank.get(key, 0) + num_bytes
    return max(by_rank.values(), default=0) / bytes_per_second + num_layers * LAYER_SECONDS
