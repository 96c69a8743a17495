"""How often and how long another pair of workers is looked for."""

import pytest

from core.errors import (
    Cancelled,
    Draining,
    EpserveError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    TransferError,
    Unavailable,
)
from gateway.cluster.failover_policy import (
    LONGEST_WAIT_SECONDS,
    MAX_EXCLUDED,
    FailoverBounds,
    FailoverPolicy,
)
from rpc.client import Disconnected

BOUNDS = FailoverBounds(
    max_attempts=4, failover_seconds=1.5, replacement_seconds=30, router_seconds=5
)


@pytest.fixture
def policy() -> FailoverPolicy:
    return FailoverPolicy(BOUNDS)


def seconds_of_patience(policy: FailoverPolicy, error: EpserveError, now: float) -> float:
    """Asks for a pair until the search gives up; how long after `now` that was."""
    begun = now
    while True:
        try:
            seconds = policy.note_no_pair(error, now)
        except Draining:
            raise AssertionError("clients are told that nobody is available") from None
        except Unavailable:
            return now - begun
        assert 0 < seconds <= 0.4
        now += seconds


@pytest.mark.parametrize(
    "error", [Unavailable("x"), TransferError("x"), Mismatch("x"), Cancelled("x")]
)
def test_failures_in_a_row_are_bounded(policy: FailoverPolicy, error: EpserveError) -> None:
    for number in range(3):
        policy.note_failure(error, f"epoch-{number}", now=number)
    assert policy.excluded_epochs == ["epoch-0", "epoch-1", "epoch-2"]
    with pytest.raises(Unavailable, match="x"):
        policy.note_failure(error, "epoch-3", now=3)


def test_clients_are_told_no_addresses(policy: FailoverPolicy) -> None:
    lost = Disconnected("failed to connect to ipv4:10.0.0.7:8001")
    for number in range(3):
        policy.note_failure(lost, f"epoch-{number}", now=number)
    with pytest.raises(Unavailable, match=r"^the workers cannot be reached$"):
        policy.note_failure(lost, "epoch-3", now=3)
    with pytest.raises(Unavailable, match=r"^no router can be reached$"):
        policy.note_no_pair(lost, now=60)


def test_workers_that_leave_as_planned_do_not_count(policy: FailoverPolicy) -> None:
    for number in range(1000):
        policy.note_failure(Draining("leaving"), f"epoch-{number}", now=0.01 * number)
    assert len(policy.excluded_epochs) == MAX_EXCLUDED
    assert policy.excluded_epochs[-1] == "epoch-999"
    for _ in range(3):
        policy.note_failure(Unavailable("dead"), "epoch", now=11)


def test_what_cannot_be_tried_again_is_told(policy: FailoverPolicy) -> None:
    with pytest.raises(InvalidRequest):
        policy.note_failure(InvalidRequest("never"), "epoch", now=0)
    with pytest.raises(InvalidRequest):
        policy.note_no_pair(InvalidRequest("never"), now=0)


def test_patience_while_there_is_no_pair(policy: FailoverPolicy) -> None:
    assert seconds_of_patience(policy, Unavailable("nobody"), 5.0) == pytest.approx(1.5)


def test_patience_begins_with_the_first_failure(policy: FailoverPolicy) -> None:
    policy.note_failure(Unavailable("dead"), "epoch", now=4.0)
    assert seconds_of_patience(policy, Unavailable("nobody"), 5.0) == pytest.approx(0.5)


def test_who_leaves_as_planned_is_about_to_be_replaced(policy: FailoverPolicy) -> None:
    policy.note_failure(Draining("leaving"), "epoch", now=4.0)
    assert seconds_of_patience(policy, Unavailable("nobody"), 5.0) == pytest.approx(29)


def test_a_router_that_expects_somebody_is_believed(policy: FailoverPolicy) -> None:
    first = policy.note_no_pair(Unavailable("nobody"), now=5.0)
    second = policy.note_no_pair(Draining("somebody is leaving"), now=5.0 + first)
    now = 5.0 + first + second
    assert seconds_of_patience(policy, Unavailable("nobody"), now) == pytest.approx(35 - now)
    fresh = FailoverPolicy(BOUNDS)
    assert seconds_of_patience(fresh, Draining("leaving"), 0.0) == pytest.approx(30)


def test_a_router_that_is_not_there_is_about_to_come_back(policy: FailoverPolicy) -> None:
    seconds = policy.note_no_pair(Unavailable("refused"), 5.0, router_is_there=False)
    now = 5.0 + seconds
    assert seconds_of_patience(policy, Unavailable("nobody"), now) == pytest.approx(10 - now)


def test_blame_fades_while_there_is_nobody_else(policy: FailoverPolicy) -> None:
    policy.note_failure(Unavailable("dead"), "epoch", now=0)
    policy.note_no_pair(Unavailable("nobody"), now=0)
    assert policy.excluded_epochs == []


@pytest.mark.parametrize("second", [Unavailable("nobody"), Draining("leaving"), Overloaded("full")])
def test_full_is_said_of_the_only_pair(policy: FailoverPolicy, second: EpserveError) -> None:
    refusal = Overloaded("full here", retry_after_seconds=7)
    policy.note_failure(refusal, "epoch", now=0)
    with pytest.raises(Overloaded, match="full here"):
        policy.note_no_pair(second, now=0)
    with pytest.raises(Overloaded):
        policy.note_failure(Overloaded("full there"), "other", now=0)


def test_full_workers_do_not_cut_what_has_begun() -> None:
    policy = FailoverPolicy(BOUNDS, has_begun=True)
    for turn in range(100):
        policy.note_failure(Overloaded("the queue is full"), f"epoch-{turn}", 10.0 * turn)
        waited = policy.note_no_pair(Overloaded("no room within 10 s"), 10.0 * turn + 5)
        assert 0 < waited <= LONGEST_WAIT_SECONDS
    assert policy.excluded_epochs == []


def test_the_only_worker_may_be_full_for_longer_than_nobody_may_be_there() -> None:
    policy = FailoverPolicy(BOUNDS, has_begun=True)
    policy.note_failure(Unavailable("dead"), "dead", now=0)
    for turn in range(100):
        policy.note_failure(Overloaded("the queue is full"), "epoch", now=turn)
        # The router was told to leave out whoever has just said that it is full.
        assert 0 < policy.note_no_pair(Unavailable("failed on all"), now=turn) <= 0.4
    assert seconds_of_patience(policy, Unavailable("nobody"), 99.5) == pytest.approx(1.0)


def test_patience_begins_anew_behind_full_workers() -> None:
    policy = FailoverPolicy(BOUNDS, has_begun=True)
    policy.note_failure(Draining("leaving"), "epoch", now=0)
    policy.note_no_pair(Overloaded("no room within 10 s"), now=10)
    assert seconds_of_patience(policy, Unavailable("nobody"), 40) == pytest.approx(1.5)


@pytest.mark.parametrize("error", [Unavailable("nobody"), Overloaded("no room within 10 s")])
def test_full_workers_do_not_cut_what_another_choice_has_begun(
    policy: FailoverPolicy, error: EpserveError
) -> None:
    policy.note_failure(Overloaded("full here"), "epoch", now=0)
    policy.note_begun()
    assert policy.note_no_pair(error, now=0) > 0
    policy.note_failure(Overloaded("full there"), "other", now=0)
