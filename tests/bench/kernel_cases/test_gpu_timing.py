"""What is compared is replayed in turns, and what warms up does not count."""

import pytest

from bench.kernel_cases import gpu_timing
from bench.kernel_cases.gpu_timing import REPLAYS, REST_SECONDS, Replay, in_turns, rested, sustained


class Clock:
    """In place of `time`, which a replay or a rest moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(gpu_timing, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def replay(self, name: str, seconds: float, told: list[tuple[str, float]]) -> Replay:
        """Gives how many seconds it took, and tells when it began."""

        def replay() -> float:
            told.append((name, self.now))
            self.now += seconds
            return seconds

        return replay


def test_in_turns() -> None:
    told: list[str] = []

    def longer_each_time(name: str, first: float) -> Replay:
        def replay() -> float:
            told.append(name)
            return first + told.count(name)

        return replay

    middle = 1 + (REPLAYS + 1) / 2
    found = in_turns(longer_each_time("a", 0), longer_each_time("b", 100))
    assert found == [middle, 100 + middle]
    assert told == ["a", "b"] * (1 + REPLAYS)
    assert in_turns() == []


def test_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), list[tuple[str, float]]()
    found = rested(clock.replay("a", 1.0, told), clock.replay("b", 2.0, told))
    assert found == [1.0, 2.0]
    assert [name for name, _ in told] == ["a", "b"] * (1 + REPLAYS)
    assert told[0][1] == REST_SECONDS
    assert told[1][1] == pytest.approx(1 + 2 * REST_SECONDS)


def test_sustained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself for as long as is said, in turns; of that the second half counts."""
    clock, told = Clock(monkeypatch), list[tuple[str, float]]()

    def slower_later(name: str, seconds: float) -> Replay:
        replay = clock.replay(name, seconds, told)
        begun: list[float] = []

        def first_fast() -> float:
            begun.append(clock.now)
            taken = replay()
            return taken if clock.now - begun[0] > 2 else 0.0

        return first_fast

    found = sustained(slower_later("a", 0.25), slower_later("b", 0.5), seconds=4.0)
    assert found == [0.25, 0.5]
    assert [name for name, _ in told] == (["a"] * 16 + ["b"] * 8) * 2
    assert sustained() == []
