"""The explorer, in a world of two counters that are to meet."""

from collections.abc import Callable, Hashable

import pytest

from tests.protocol.explorer import ProtocolError, explore, replay, shortened, wander

GOAL = 3


class Counters:
    """Each counts to GOAL. `trap`: a pair of counts from which there is no way on; `wrong`: one
    that must not be."""

    def __init__(
        self, trap: tuple[int, int] | None = None, wrong: tuple[int, int] | None = None
    ) -> None:
        self.counts = [0, 0]
        self._trap = trap
        self._wrong = wrong

    def choices(self) -> list[str]:
        if tuple(self.counts) == self._trap:
            return ["nothing"]
        return [f"count {index}" for index in (0, 1) if self.counts[index] < GOAL]

    def do(self, choice: str) -> None:
        if choice != "nothing":
            self.counts[int(choice[-1])] += 1

    def check(self) -> None:
        assert tuple(self.counts) != self._wrong, "wrong"

    def check_over(self) -> None:
        assert self.counts == [GOAL, GOAL]

    def fingerprint(self) -> Hashable:
        return tuple(self.counts)

    def close(self) -> None: ...


def test_every_state_is_seen_once() -> None:
    explored = explore(Counters, 1000)
    assert explored.num_states == (GOAL + 1) ** 2
    assert explored.num_steps == 2 * GOAL * (GOAL + 1)
    assert explored.num_ends == 1
    assert explored.longest == 2 * GOAL
    assert explored.is_whole


def test_a_bound_is_kept_to() -> None:
    explored = explore(Counters, 7)
    assert explored.num_states == 7
    assert not explored.is_whole


def test_what_is_wrong_is_told_with_the_shortest_way_there() -> None:
    def make() -> Counters:
        return Counters(wrong=(2, 1))

    with pytest.raises(ProtocolError, match="wrong") as found:
        explore(make, 1000)
    assert len(shortened(make, found.value).trace) == 3
    with pytest.raises(ProtocolError, match="wrong"):
        _wander_often(make)


def test_a_state_without_a_way_to_an_end_is_told() -> None:
    with pytest.raises(ProtocolError, match="no end is reached") as found:
        explore(lambda: Counters(trap=(1, 1)), 1000)
    assert replay(Counters, found.value.trace).counts == [1, 1]
    with pytest.raises(ProtocolError, match="no end comes"):
        _wander_often(lambda: Counters(trap=(1, 1)))


def _wander_often(make: Callable[[], Counters]) -> None:
    for seed in range(100):
        wander(make, seed)
