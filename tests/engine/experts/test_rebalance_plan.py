"""What a rebalance costs and gains, and windows of load."""

import numpy as np
import pytest

from engine.experts.load_windows import LoadWindows
from engine.experts.rebalance_plan import LAYER_SECONDS, Experts, plan_of
from ep.placement.placement import Placement


def experts(placement: Placement, *tokens: list[int]) -> Experts:
    return Experts(
        placement=placement,
        placement_version=4,
        expert_bytes=1000,
        tokens=np.array(tokens, dtype=np.float64),
        window_seconds=60,
    )


def test_cost_and_gain() -> None:
    now = Placement.trivial(2, 4, 2)
    target = now.with_layers({0: (2, 0, 3, 1), 1: (1, 0, 2, 3)})
    plan = plan_of(experts(now, [9, 7, 1, 3], [1, 1, 1, 1]), target, 4000, only_gains=False)
    # Experts 0 and 3 stay where they are; a change of order within a rank is none.
    assert plan.changes == {0: (0, 2, 3, 1)} or plan.changes == {0: (0, 2, 1, 3)}
    assert plan.traffic == {(0, 1): 1000, (1, 0): 1000}
    assert (plan.num_moves, plan.num_bytes) == (2, 2000)
    assert plan.seconds == pytest.approx(0.25 + LAYER_SECONDS)
    (layer,) = plan.layers
    assert (layer.balancedness_before, layer.balancedness_after) == (10 / 16, 1.0)
    assert plan.balancedness_before == (10 / 16 + 1) / 2
    assert plan.balancedness_after == 1.0
    assert plan.placement_version == 4


def test_layers_that_gain_nothing_stay() -> None:
    now = Placement.trivial(1, 4, 2)
    worse = now.with_layers({0: (0, 2, 1, 3)})
    load = experts(now, [1, 3, 2, 2])
    assert plan_of(load, worse, 1e9, only_gains=True).layers == ()
    assert plan_of(load, worse, 1e9, only_gains=True).balancedness_after == 1.0
    assert len(plan_of(load, worse, 1e9, only_gains=False).layers) == 1


def test_other_shapes_are_refused() -> None:
    now = Placement.trivial(1, 4, 2)
    with pytest.raises(ValueError, match="another shape"):
        plan_of(experts(now, [1, 1, 1, 1]), Placement.trivial(1, 4, 4), 1e9, only_gains=True)


def test_windows() -> None:
    windows = LoadWindows(40)
    assert windows.interval_seconds == 10

    def add(now: float, total: float) -> tuple[float, float]:
        seconds, counts = windows.add(now, np.array([[total]]))
        return seconds, counts[0, 0]

    assert add(100, 7) == (0, 7)  # what was counted before anybody looked
    assert add(110, 20) == (10, 20)
    assert add(114, 22) == (14, 22)
    assert add(140, 30) == (40, 30)
    assert add(150, 35) == (40, 15)  # from the snapshot at 110 on
    assert add(190, 36) == (40, 1)
    assert add(1000, 40) == (810, 4)
