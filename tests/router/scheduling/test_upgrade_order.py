"""Every order in which two roles with one group each can be replaced: some pair always serves.

A LeaderWorkerSet with surge 1 replaces its only group in these steps, each of which may be late. O
is an old group, n a new one, [n] one that loads. A step to n! needs the start probe of the chart's
pods, which asks the router whether the new worker is paired.

    O   O [n]   O n   O n!   [n] n   n n   n! n   n
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from router.scheduling.pairing import paired
from router.workers.table import StatusArrived, WorkerTable
from tests.router.statuses import ROLES, make_status

OLD, LOADING, NEW = "old", "loading", "new"
STEPS = (
    (OLD,),
    (OLD, LOADING),
    (OLD, NEW),
    (OLD, NEW),
    (LOADING, NEW),
    (NEW, NEW),
    (NEW, NEW),
    (NEW,),
)
PROBED = (3, 6)
END = len(STEPS) - 1

State = tuple[int, int]  # step of prefill, of decode


@dataclass(frozen=True, kw_only=True)
class Rollout:
    pairing_version: str  # of the new workers; the old ones have 1
    asks_router: bool = True  # the probe; else it asks the worker alone
    num_nodes: int = 4  # a group each
    decode_loads: bool = True

    def reached(self) -> set[State]:
        """All states that some order leads to."""
        found, ahead = set[State](), [(0, 0)]
        while ahead:
            state = ahead.pop()
            if state not in found:
                found.add(state)
                ahead += self._following(state)
        return found

    def stuck(self) -> set[State]:
        return {state for state in self.reached() if not list(self._following(state))}

    def serving(self, state: State) -> set[str]:
        """Names of the workers that get requests, as the router has it."""
        table = WorkerTable()
        for role, step in zip(("prefill", "decode"), state, strict=True):
            for index, what in enumerate(STEPS[step]):
                version = "1" if what == OLD else self.pairing_version
                name = f"{what}-{role}-{index}"
                status = make_status(
                    role, name, name=name, ready=what != LOADING, pairing_version=version
                )
                table.step(StatusArrived(f"{name}:1", ROLES[role], status), 0.0)
        return {worker.name for worker in paired(table.workers)}

    def _following(self, state: State) -> Iterator[State]:
        for index, role in enumerate(("prefill", "decode")):
            step = state[index] + 1
            after = (step, state[1]) if index == 0 else (state[0], step)
            if step > END or sum(len(STEPS[one]) for one in after) > self.num_nodes:
                continue
            if role == "decode" and step == 2 and not self.decode_loads:
                continue
            new = {f"new-{role}-{place}" for place in range(2)}
            if step in PROBED and self.asks_router and not new & self.serving(state):
                continue
            yield after


@pytest.mark.parametrize("version", ["1", "2"])
def test_some_pair_serves_in_every_order(version: str) -> None:
    rollout = Rollout(pairing_version=version)
    states = rollout.reached()
    assert len(states) > 30
    assert [state for state in states if not rollout.serving(state)] == []
    assert rollout.stuck() == {(END, END)}


def test_without_the_routers_word_there_are_orders_without_a_pair() -> None:
    rollout = Rollout(pairing_version="2", asks_router=False)
    assert [state for state in rollout.reached() if not rollout.serving(state)]


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_version_that_does_not_load_stops_the_rollout_and_nothing_else(version: str) -> None:
    rollout = Rollout(pairing_version=version, decode_loads=False)
    assert all(rollout.serving(state) for state in rollout.reached())
    assert all(decode == 1 for _, decode in rollout.stuck())
    if version == "2":
        assert all("old-prefill-0" in rollout.serving(state) for state in rollout.reached())


@pytest.mark.parametrize(("version", "ends"), [("1", True), ("2", False)])
def test_one_spare_node_is_enough_where_the_pairing_version_stays(version: str, ends: bool) -> None:
    rollout = Rollout(pairing_version=version, num_nodes=3)
    assert all(rollout.serving(state) for state in rollout.reached())
    assert (rollout.stuck() == {(END, END)}) is ends
