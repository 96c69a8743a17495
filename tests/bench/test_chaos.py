"""What the soak counts, keeps and records."""

from dataclasses import replace

import pytest

from bench.chaos import STORY_SECONDS, TO_AND_FRO, Footprint, Outcome, leaks, records, story
from bench.serving.twins import Tally, Verdict
from ctl.chaos.faults import Fault, Kind
from ctl.chaos.injector import Injected
from loadgen.records import BenchRun

BEFORE = Footprint(
    num_pages=0,
    num_open=0,
    num_ready=4,
    held={"gateway": {"fds": 20, "tasks": 9}, "router": {"fds": 10}},
    num_processes=12,
)


def test_nothing_more_than_before_is_no_leak() -> None:
    assert leaks(BEFORE, BEFORE) == {}
    assert leaks(BEFORE, replace(BEFORE, held={"gateway": {"fds": 5, "tasks": 1}})) == {}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_pages": 3}, {"pages": 3}),
        ({"num_open": 1}, {"open requests": 1}),
        ({"num_ready": 3}, {"missing workers": 1}),
        ({"num_processes": 14}, {"processes": 2}),
        ({"num_processes": 11}, {"processes": 1}),
        ({"held": {"gateway": {"fds": 21 + TO_AND_FRO}}}, {"fds of gateway": 1 + TO_AND_FRO}),
        ({"held": {"gateway": {"tasks": 99}}}, {"tasks of gateway": 90}),
    ],
)
def test_what_there_is_more_of_is_a_leak(
    change: dict[str, object], found: dict[str, float]
) -> None:
    assert leaks(BEFORE, replace(BEFORE, **change)) == found  # type: ignore[arg-type]


def injected(began: float, over: float, target: str, problem: str = "") -> Injected:
    fault = Fault(at_seconds=began - 1, kind=Kind.STOP, targets=(target,), seconds=over - began)
    return Injected(fault=fault, began=began, over=over, problem=problem)


def outcome(tally: Tally) -> Outcome:
    late = 3 * STORY_SECONDS
    return Outcome(
        tally=tally,
        injected=[
            injected(1, 2, "long ago"),
            injected(late, late + 5, "overlaps"),
            injected(late - 10, late - 8, "before", problem="hangs"),
            injected(late + 9, late + 10, "later"),
        ],
        leaks={"pages": 2.0},
        started=1000.0,
        seconds=400.0,
    )


def test_the_story_ends_with_the_first_bad_stream() -> None:
    bad = Tally(bad=[(1000.0 + 3 * STORY_SECONDS + 2, "lost"), (9999.0, "lost")])
    assert [(one.at_seconds, *one.targets) for one in story(outcome(bad))] == [
        (0.0, "before"),
        (10.0, "overlaps"),
    ]
    assert len(story(outcome(Tally()))) == 4  # of a leak nobody knows when it began


def test_records() -> None:
    tally = Tally(num_tokens=70, pauses=[0.5, 6.0], firsts=[1.0])
    tally.verdicts[Verdict.SAME], tally.verdicts[Verdict.LOST] = 8, 1
    run = BenchRun.begin("chaos", on_cpu=True)
    found = {one.metric: one for one in records(run, outcome(tally), "a case")}
    values = {"faults: stop": 4, "streams": 8, "tokens": 70, "longest_pause_max": 6.0, "lost": 1}
    values |= {"repeated": 0, "leaked": 2, "not_recovered": 1, "first_token_max": 1.0}
    assert {name: found[name].value for name in values} == values
    assert found["longest_pause_max"].peer_value == 5.0
    assert found["first_token_max"].peer is None
    assert len(outcome(tally).problems()) == 2  # beside what was wrong with streams
