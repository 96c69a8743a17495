"""What is compared is replayed in turns, and the first round, which warms up, does not count."""

from bench.gpu_timing import REPLAYS, Replay, in_turns


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
