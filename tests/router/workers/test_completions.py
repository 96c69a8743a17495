import pytest

from router.workers.completions import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    WINDOW_SECONDS,
    Completions,
)
from router.workers.table import StatusArrived, WorkerTable
from tests.router.statuses import ROLES, make_status


def test_nothing_known_is_the_least() -> None:
    assert Completions().retry_after_seconds(1000, 0.0) == MIN_RETRY_SECONDS


def test_the_pace_of_the_window_decides() -> None:
    completions = Completions()
    for second in range(6):
        completions.record(2, float(second))  # 12 in 5 s
    assert completions.retry_after_seconds(11, 5.0) == pytest.approx(5.0)
    assert completions.retry_after_seconds(0, 5.0) == MIN_RETRY_SECONDS
    assert completions.retry_after_seconds(10**6, 5.0) == MAX_RETRY_SECONDS
    assert completions.retry_after_seconds(10**6, 5.1 + WINDOW_SECONDS) == MIN_RETRY_SECONDS


def test_a_burst_is_not_an_endless_pace() -> None:
    completions = Completions()
    completions.record(1, 10.0)
    assert completions.retry_after_seconds(4, 10.001) == pytest.approx(5.0)


def test_a_request_just_accepted_has_not_ended() -> None:
    """The worker counts it as accepted before its rank shows it: seen as one ended, once."""
    table = WorkerTable()

    def say(accepted: int, running: int, now: float) -> None:
        status = make_status("decode", "d", accepted=accepted, num_running=running)
        table.step(StatusArrived("d0", ROLES["decode"], status), now)

    say(100, 0, 0.0)  # a worker that has served before: the past does not count
    assert table.completions.retry_after_seconds(9, 0.0) == MIN_RETRY_SECONDS
    for step in range(5):
        say(101 + step, step, 0.1 * step)  # one behind
        say(101 + step, step + 1, 0.1 * step)
    say(105, 4, 1.0)  # the first one really ends: it was counted already
    assert table.completions.retry_after_seconds(9, 1.0) == pytest.approx(10.0)
    say(105, 0, 1.0)
    assert table.completions.retry_after_seconds(9, 1.0) == pytest.approx(2.0)
