"""Whether a worker that has gone is expected to be replaced."""

import pytest

from proto.worker_pb2 import ROLE_DECODE
from router.workers.departures import LONGEST_ABSENCE_SECONDS, Departures
from router.workers.table import Transition
from router.workers.worker import Load, Worker, WorkerState
from tests.router.statuses import make_status

LOADING, READY, DRAINING, LOST = (
    WorkerState.LOADING, WorkerState.READY, WorkerState.DRAINING, WorkerState.LOST,
)  # fmt: skip


@pytest.fixture
def departures() -> Departures:
    return Departures()


def change(before: WorkerState | None, after: WorkerState, address: str = "a:1") -> Transition:
    status = make_status("decode", "e")
    worker = Worker(address=address, role=ROLE_DECODE, status=status, load=Load.of(status))
    return Transition(worker, before, after)


def test_nobody_has_left(departures: Departures) -> None:
    departures.note(change(None, LOADING), 0)
    departures.note(change(LOADING, READY), 1)
    assert not departures.replacement_expected(1)


def test_a_death_is_not_planned(departures: Departures) -> None:
    departures.note(change(READY, LOST), 1)
    assert not departures.replacement_expected(1)


def test_a_restart(departures: Departures) -> None:
    for now, before, after in (
        (0, READY, DRAINING), (50, DRAINING, LOST), (100, None, LOADING),
    ):  # fmt: skip
        departures.note(change(before, after), now)
        assert departures.replacement_expected(now)
    departures.note(change(LOADING, READY), 105)
    assert not departures.replacement_expected(105)


def test_a_drain_that_is_undone(departures: Departures) -> None:
    departures.note(change(READY, DRAINING), 0)
    departures.note(change(DRAINING, READY), 1)
    assert not departures.replacement_expected(1)


def test_who_stays_away_is_given_up(departures: Departures) -> None:
    departures.note(change(READY, DRAINING), 0)
    departures.note(change(READY, DRAINING, "b:1"), 30)
    assert departures.replacement_expected(LONGEST_ABSENCE_SECONDS)
    assert not departures.replacement_expected(LONGEST_ABSENCE_SECONDS + 30)
