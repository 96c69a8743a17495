"""The state machine of supervision, without processes and without waiting."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctl.local.supervision import (
    Elapsed,
    Event,
    Exited,
    Finish,
    Kill,
    Limits,
    ProcessPhase,
    Ready,
    Start,
    StopRequested,
    Supervision,
    Terminate,
)

NAMES = ["router", "decode-0"]


class SayReady(NamedTuple):
    name: str
    again: bool


class SayAllReady(NamedTuple):
    pass


class SayDied(NamedTuple):
    name: str
    status: int
    backoff_seconds: float


class SayLeft(NamedTuple):
    name: str


class GiveUp(NamedTuple):
    name: str
    status: int


class TooLate(NamedTuple):
    names: tuple[str, ...]


class Said(list[object]):
    """A Reporter that remembers what happened to single processes."""

    def started(self, name: str, pid: int) -> None: ...

    def waiting_for(self, names: Sequence[str]) -> None: ...

    def ready(self, name: str, seconds: float, again: bool) -> None:
        self.append(SayReady(name, again))

    def all_ready(self, seconds: float) -> None:
        self.append(SayAllReady())

    def silent(self, name: str) -> None: ...

    def died(self, name: str, status: int, backoff_seconds: float) -> None:
        self.append(SayDied(name, status, backoff_seconds))

    def left(self, name: str) -> None:
        self.append(SayLeft(name))

    def gave_up(self, name: str, status: int) -> None:
        self.append(GiveUp(name, status))

    def not_ready_in_time(self, names: Sequence[str], seconds: float) -> None:
        self.append(TooLate(tuple(names)))

    def stopping(self, names: Sequence[str]) -> None: ...

    def stopped(self, seconds: float) -> None: ...


class Machine(Supervision):
    """Each step tells what was said, and then the actions."""

    def __init__(
        self, names: list[str], limits: Limits | None = None, *, fronts: Collection[str] = ()
    ) -> None:
        self.said = Said()
        super().__init__(names, limits or Limits(), self.said, fronts=fronts)

    def step(self, event: Event, now: float) -> list[Any]:
        self.said.clear()
        actions = super().step(event, now)
        return [*self.said, *actions]


def running() -> Machine:
    """Both processes up since second 1."""
    machine = Machine(NAMES)
    machine.start(0.0)
    for name in NAMES:
        machine.step(Ready(name), 1.0)
    assert machine.names(ProcessPhase.RUNNING) == NAMES
    return machine


def test_all_start_at_once_and_the_last_one_completes_the_cluster() -> None:
    machine = Machine(NAMES)
    assert machine.start(0.0) == [Start("router"), Start("decode-0")]
    assert machine.step(Ready("decode-0"), 1.0) == [SayReady("decode-0", again=False)]
    assert machine.step(Ready("router"), 2.0) == [SayReady("router", again=False), SayAllReady()]


def test_two_processes_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Machine(["router", "router"])


def test_a_dead_process_comes_back_after_its_backoff() -> None:
    machine = running()
    assert machine.step(Exited("decode-0", -9), 100.0) == [SayDied("decode-0", -9, 0.5)]
    assert machine.deadline() == 100.5
    assert machine.step(Elapsed(), 100.4) == []
    assert machine.step(Elapsed(), 100.5) == [Start("decode-0")]
    assert machine.deadline() is None
    # Not SayAllReady: the table is shown once.
    assert machine.step(Ready("decode-0"), 102.0) == [SayReady("decode-0", again=True)]


def test_a_process_that_was_asked_to_leave_comes_back_at_once() -> None:
    machine = running()
    for now in range(100, 120):
        assert machine.step(Exited("decode-0", 0), now) == [SayLeft("decode-0"), Start("decode-0")]
        assert machine.names(ProcessPhase.STARTING) == ["decode-0"]
        assert machine.step(Ready("decode-0"), now) == [SayReady("decode-0", again=True)]
    assert machine.step(Exited("decode-0", 1), 121) == [SayDied("decode-0", 1, 0.5)]


def test_who_leaves_well_before_it_was_ready_has_its_backoff() -> None:
    machine = running()
    machine.step(Exited("decode-0", 0), 100)
    assert machine.step(Exited("decode-0", 0), 101) == [SayDied("decode-0", 0, 0.5)]


def test_backoff_doubles_up_to_its_bound_and_forgets_after_a_stable_time() -> None:
    machine = running()
    now, seen = 100.0, []
    for _ in range(7):
        (died,) = machine.step(Exited("router", 1), now)
        assert isinstance(died, SayDied)
        seen.append(died.backoff_seconds)
        now += died.backoff_seconds
        machine.step(Elapsed(), now)
    assert seen == [0.5, 1, 2, 4, 8, 10, 10]
    assert machine.step(Exited("router", 1), now + 30) == [SayDied("router", 1, 0.5)]


def test_each_process_has_its_own_backoff() -> None:
    machine = running()
    machine.step(Exited("router", 1), 100.0)
    machine.step(Exited("decode-0", 1), 100.2)
    assert machine.deadline() == 100.5
    assert machine.step(Elapsed(), 100.5) == [Start("router")]
    assert machine.deadline() == 100.7


def test_a_usage_error_before_the_first_success_ends_the_cluster() -> None:
    machine = Machine(NAMES)
    machine.start(0.0)
    assert machine.step(Exited("decode-0", 2), 0.3) == [
        GiveUp("decode-0", 2),
        Terminate("router"),
    ]
    assert machine.step(Exited("router", 0), 0.4) == [Finish()]


def test_three_deaths_before_the_first_success_end_the_cluster() -> None:
    machine = Machine(NAMES)
    machine.start(0.0)
    for now in (1.0, 2.0):
        assert isinstance(machine.step(Exited("decode-0", 1), now)[0], SayDied)
        machine.step(Elapsed(), now + 1)
    assert machine.step(Exited("decode-0", 1), 5.0)[0] == GiveUp("decode-0", 1)


def test_a_cluster_that_is_not_up_in_time_is_ended() -> None:
    machine = Machine(NAMES, Limits(ready_seconds=60.0))
    machine.start(10.0)
    machine.step(Ready("router"), 20.0)
    assert machine.deadline() == 70.0
    assert machine.step(Elapsed(), 69.9) == []
    assert machine.step(Elapsed(), 70.0) == [
        TooLate(("decode-0",)),
        Terminate("router"),
        Terminate("decode-0"),
    ]
    assert machine.failed


def test_a_cluster_that_was_up_is_never_given_up() -> None:
    machine = running()
    for now in range(100, 1000, 100):
        assert isinstance(machine.step(Exited("decode-0", 2), float(now))[0], SayDied)
        assert machine.step(Elapsed(), now + 50.0) == [Start("decode-0")]


def test_stop_terminates_then_kills_then_abandons() -> None:
    machine = running()
    assert machine.step(StopRequested(), 50.0) == [Terminate("router"), Terminate("decode-0")]
    assert machine.step(Exited("router", 0), 50.1) == []
    assert machine.deadline() == 53.5
    assert machine.step(Elapsed(), 53.5) == [Kill("decode-0")]
    assert machine.deadline() == 54.5
    assert machine.step(Elapsed(), 54.5) == [Finish()]


def test_a_second_stop_kills_at_once() -> None:
    machine = running()
    machine.step(StopRequested(), 50.0)
    assert machine.step(StopRequested(), 50.2) == [Kill("router"), Kill("decode-0")]
    assert machine.step(Exited("router", -9), 50.3) == []
    assert machine.step(Exited("decode-0", -9), 50.3) == [Finish()]


FRONTED = ["gateway", *NAMES]


def running_with_a_front() -> Machine:
    machine = Machine(FRONTED, Limits(front_seconds=30.0), fronts=["gateway"])
    machine.start(0.0)
    for name in FRONTED:
        machine.step(Ready(name), 1.0)
    return machine


def test_the_others_serve_until_the_front_has_answered() -> None:
    machine = running_with_a_front()
    assert machine.step(StopRequested(), 50.0) == [Terminate("gateway")]
    assert machine.deadline() == 80.0
    assert machine.step(Exited("gateway", 0), 70.0) == [Terminate("router"), Terminate("decode-0")]
    assert machine.deadline() == 73.5
    assert machine.step(Exited("router", 0), 70.1) == []
    assert machine.step(Exited("decode-0", 0), 70.2) == [Finish()]


def test_a_front_that_does_not_end_is_killed() -> None:
    machine = running_with_a_front()
    machine.step(StopRequested(), 50.0)
    assert machine.step(Elapsed(), 79.9) == []
    assert machine.step(Elapsed(), 80.0) == [
        Kill("gateway"),
        Terminate("router"),
        Terminate("decode-0"),
    ]
    assert machine.step(Exited("gateway", -9), 80.1) == []
    assert machine.step(Elapsed(), 83.5) == [Kill("router"), Kill("decode-0")]


def test_a_second_stop_waits_for_no_front() -> None:
    machine = running_with_a_front()
    machine.step(StopRequested(), 50.0)
    assert machine.step(StopRequested(), 51.0) == [*map(Kill, FRONTED)]
    assert machine.step(Exited("gateway", -9), 51.1) == []
    assert machine.deadline() == 52.0


def test_a_front_that_still_starts_has_nothing_to_answer() -> None:
    machine = Machine(FRONTED, fronts=["gateway"])
    machine.start(0.0)
    assert machine.step(StopRequested(), 0.5) == [*map(Terminate, FRONTED)]


def test_stop_while_a_process_waits_for_its_restart() -> None:
    machine = running()
    machine.step(Exited("decode-0", 1), 50.0)
    assert machine.step(StopRequested(), 50.1) == [Terminate("router")]
    assert machine.step(Exited("router", 0), 50.2) == [Finish()]


def test_stop_with_nothing_alive_ends_at_once() -> None:
    machine = running()
    for name in NAMES:
        machine.step(Exited(name, 1), 50.0)
    assert machine.step(StopRequested(), 50.1) == [Finish()]


def test_readiness_that_comes_too_late_means_nothing() -> None:
    machine = running()
    machine.step(Exited("decode-0", 1), 50.0)
    assert machine.step(Ready("decode-0"), 50.1) == []
    assert machine.names(ProcessPhase.WAITING) == ["decode-0"]


EVENTS = st.one_of(
    st.builds(Ready, st.sampled_from(FRONTED)),
    st.builds(Exited, st.sampled_from(FRONTED), st.sampled_from([0, 1, 2, -9])),
    st.just(Elapsed()),
    st.just(StopRequested()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 20.0)), max_size=60))
def test_processes_are_started_only_when_dead_and_never_after_a_stop(
    history: list[tuple[Event, float]],
) -> None:
    machine = Machine(FRONTED, fronts=["gateway"])
    now = 0.0
    alive = {action.name for action in machine.start(now) if isinstance(action, Start)}
    finished = False
    for event, seconds in history:
        now += seconds
        if finished or (isinstance(event, Exited | Ready) and event.name not in alive):
            continue  # cannot happen
        if isinstance(event, Exited):
            alive.discard(event.name)
        for action in machine.step(event, now):
            if isinstance(action, Start):
                assert not machine.names(ProcessPhase.STOPPING)
                assert action.name not in alive
                alive.add(action.name)
            elif isinstance(action, Terminate):
                assert action.name in alive
            elif isinstance(action, Finish):
                finished = True
        if not finished:
            waits = machine.deadline() is not None
            assert alive or waits, "nothing alive, and nothing to wait for"
