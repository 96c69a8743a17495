"""The books of a rank: every event in every phase, then long random walks."""

from unittest.mock import Mock

import pytest

from decode_worker.events import Admit, Event, Grow, Landed, Launched, Outcome, Preempt, Tick
from decode_worker.request import RequestPhase
from decode_worker.state import RankState
from engine.kv.pages import pages_of
from engine.link.kv_notice import KvNotice
from engine.link.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    PrefillStopped,
    Produced,
    Quarantined,
    RankMessage,
    Reserved,
    TokenOut,
)
from engine.sampling.history import History
from tests.decode_worker.books import EOS, OTHER, all_kv, make_state, prefilled, stepped, submit

FIRST, SECOND = "e-0-1", "e-0-2"
WAITING: tuple[Event, ...] = (submit("a"),)
PREFILLING: tuple[Event, ...] = (*WAITING, Admit("a"))
HALF_KV: tuple[Event, ...] = (*PREFILLING, KvNotice(FIRST, 0, 1, 0, 2))
FULL_KV: tuple[Event, ...] = (*PREFILLING, all_kv(FIRST))
PREFILLED: tuple[Event, ...] = (*PREFILLING, prefilled(FIRST))
RUNNING: tuple[Event, ...] = (*FULL_KV, prefilled(FIRST))
PREEMPTED: tuple[Event, ...] = (*RUNNING, Preempt("a"))
AGAIN: tuple[Event, ...] = (*PREEMPTED, Admit("a"))
LAUNCH, GOES_ON, ENDS = (
    Launched(("a",)),
    *(Landed((Outcome((TokenOut(token_id=token_id),)),)) for token_id in (OTHER, EOS)),
)
STEPPING: tuple[Event, ...] = (*RUNNING, LAUNCH)
OVER: tuple[Event, ...] = (*STEPPING, ENDS)
# Over, preempted or begun anew while a step that it is part of is under way.
ENDED_AHEAD: tuple[Event, ...] = (*STEPPING, LAUNCH, ENDS)
ABORTED_AHEAD: tuple[Event, ...] = (*STEPPING, Abort(request_id="a"))
PREEMPTED_AHEAD: tuple[Event, ...] = (*STEPPING, Preempt("a"))
AGAIN_AHEAD: tuple[Event, ...] = (*PREEMPTED_AHEAD, Admit("a"), all_kv("e-0-2"))
ANEW_AHEAD: tuple[Event, ...] = (*ABORTED_AHEAD, submit("a"))
NOTHING: tuple[Event, ...] = ()

STATES = {
    "nothing": NOTHING,
    "waiting": WAITING,
    "prefilling": PREFILLING,
    "half_kv": HALF_KV,
    "full_kv": FULL_KV,
    "prefilled": PREFILLED,
    "running": RUNNING,
    "preempted": PREEMPTED,
    "again": AGAIN,
    "over": OVER,
    "stepping": STEPPING,
    "ended_ahead": ENDED_AHEAD,
    "aborted_ahead": ABORTED_AHEAD,
    "preempted_ahead": PREEMPTED_AHEAD,
    "again_ahead": AGAIN_AHEAD,
    "anew_ahead": ANEW_AHEAD,
}


def brought_to(name: str) -> RankState:
    state = make_state()
    for event in STATES[name]:
        state.step(event, now=0.0)
    return state


def phase_of(state: RankState) -> RequestPhase | None:
    request = state.requests.get("a")
    return None if request is None else request.phase


def token(token_id: int, finish: Finish = Finish.NONE) -> Produced:
    return Produced(request_id="a", tokens=(TokenOut(token_id=token_id),), finish=finish)


def failed(attempt_id: str) -> Failed:
    return Failed(request_id="a", attempt_id=attempt_id, code="UNAVAILABLE", message="gone")


def quarantined(attempt_id: str) -> Quarantined:
    return Quarantined(request_id="a", attempt_id=attempt_id)


W, P, R = RequestPhase.WAITING, RequestPhase.PREFILLING, RequestPhase.RUNNING
ENDED = Ended(request_id="a")

# state, event, phase after it, what the front hears. Whatever is not listed changes nothing.
TRANSITIONS: list[tuple[str, Event, RequestPhase | None, list[RankMessage]]] = [
    ("nothing", submit("a"), W, []),
    ("waiting", Abort(request_id="a"), None, [ENDED]),
    ("waiting", failed(""), None, [failed("")]),
    ("preempted", failed(""), None, [failed("")]),
    ("prefilling", prefilled(FIRST), P, []),
    ("prefilling", all_kv(FIRST), P, []),
    ("prefilling", failed(FIRST), None, [quarantined(FIRST), failed(FIRST)]),
    ("prefilling", Abort(request_id="a"), None, [quarantined(FIRST), ENDED]),
    ("half_kv", KvNotice(FIRST, 1, 1, 0, 2), P, []),
    ("half_kv", prefilled(FIRST), P, []),
    ("half_kv", failed(FIRST), None, [quarantined(FIRST), failed(FIRST)]),
    ("half_kv", Abort(request_id="a"), None, [quarantined(FIRST), ENDED]),
    ("full_kv", prefilled(FIRST), R, [token(OTHER)]),
    ("full_kv", prefilled(FIRST, EOS), None, [token(EOS, Finish.STOP)]),
    ("full_kv", failed(FIRST), None, [failed(FIRST)]),
    ("full_kv", Abort(request_id="a"), None, [ENDED]),
    ("prefilled", all_kv(FIRST), R, [token(OTHER)]),
    ("prefilled", failed(FIRST), None, [quarantined(FIRST), failed(FIRST)]),
    ("prefilled", Abort(request_id="a"), None, [quarantined(FIRST), ENDED]),
    ("running", LAUNCH, R, []),
    ("running", Preempt("a"), W, []),
    ("running", Abort(request_id="a"), None, [ENDED]),
    ("preempted", Abort(request_id="a"), None, [ENDED]),
    ("again", Abort(request_id="a"), None, [quarantined(SECOND), ENDED]),
    ("again", failed(SECOND), None, [quarantined(SECOND), failed(SECOND)]),
    ("again", prefilled(SECOND), P, []),
    ("again", all_kv(SECOND), P, []),
    ("nothing", Abort(request_id="a"), None, [ENDED]),
    ("over", Abort(request_id="a"), None, [ENDED]),
    ("over", submit("a"), W, []),
    ("stepping", LAUNCH, R, []),
    ("stepping", GOES_ON, R, [token(OTHER)]),
    ("stepping", ENDS, None, [token(EOS, Finish.STOP)]),
    ("stepping", Preempt("a"), W, []),
    ("stepping", Abort(request_id="a"), None, [ENDED]),
    ("ended_ahead", GOES_ON, None, []),
    ("ended_ahead", submit("a"), W, []),
    ("aborted_ahead", ENDS, None, []),
    ("aborted_ahead", submit("a"), W, []),
    ("preempted_ahead", GOES_ON, W, []),
    ("preempted_ahead", Abort(request_id="a"), None, [ENDED]),
    ("preempted_ahead", failed(""), None, [failed("")]),
    ("again_ahead", ENDS, P, []),
    ("again_ahead", prefilled(SECOND), R, [token(OTHER)]),
    ("again_ahead", failed(SECOND), None, [failed(SECOND)]),
    ("again_ahead", Abort(request_id="a"), None, [ENDED]),
    ("anew_ahead", ENDS, W, []),
    ("anew_ahead", failed(""), None, [failed("")]),
    ("anew_ahead", Abort(request_id="a"), None, [ENDED]),
]
LISTED = {(name, repr(event)) for name, event, _, _ in TRANSITIONS}
EVENTS: list[Event] = [
    submit("a"),
    prefilled(FIRST),
    prefilled(FIRST, EOS),
    prefilled(SECOND),
    prefilled(FIRST, request_id="b"),
    all_kv(FIRST),
    all_kv(SECOND),
    KvNotice(FIRST, 0, 1, 0, 2),
    failed(FIRST),
    failed(SECOND),
    failed(""),
    Abort(request_id="a"),
    Abort(request_id="b"),
    PrefillStopped(attempt_id=FIRST),
    Preempt("a"),
    Tick(),
]
# Admit and Grow are the planner's: it gives them only where there are pages. Landed is the loop's:
# it gives one for each Launched.


@pytest.mark.parametrize(
    ("name", "event", "phase", "heard"), TRANSITIONS, ids=lambda value: str(value)[:30]
)
def test_transition(
    name: str, event: Event, phase: RequestPhase | None, heard: list[RankMessage]
) -> None:
    state = brought_to(name)
    assert state.step(event, now=1.0) == heard
    assert phase_of(state) is phase
    state.pool.check_integrity()


UNLISTED = [
    (name, event) for name in STATES for event in EVENTS if (name, repr(event)) not in LISTED
]


@pytest.mark.parametrize(("name", "event"), UNLISTED, ids=lambda value: str(value)[:40])
def test_late_double_and_foreign_events_change_nothing(name: str, event: Event) -> None:
    state = brought_to(name)
    before = (phase_of(state), state.pool.counts(), list(state.requests))
    heard = state.step(event, now=1.0)
    after = (phase_of(state), state.pool.counts(), list(state.requests))
    if isinstance(event, Abort):
        assert heard == [Ended(request_id=event.request_id)]
    else:
        assert heard == []
    assert after == before


def test_reserved_has_pages_for_all_tokens_so_far() -> None:
    state = make_state()
    state.step(submit("a"), 0.0)
    (reserved,) = state.step(Admit("a"), 0.0)
    assert isinstance(reserved, Reserved)
    assert len(pages_of(reserved.target.runs)) == 2
    assert (reserved.target.agent, reserved.target.kv_fingerprint) == (b"agent", "f")
    for event in (all_kv(FIRST), prefilled(FIRST), *stepped("a", token_id=8)):
        state.step(event, 0.0)
    state.step(Preempt("a"), 0.0)
    assert state.pool.num_free == 20
    (again,) = state.step(Admit("a"), 0.0)
    assert isinstance(again, Reserved)
    assert len(pages_of(again.target.runs)) == 2
    assert again.attempt_id == SECOND
    assert state.totals.preemptions == 1


def test_pages_stay_in_quarantine_until_prefill_has_stopped() -> None:
    state = brought_to("half_kv")
    state.step(Abort(request_id="a"), 0.0)
    assert state.pool.counts().quarantined == 2
    # Late writes of the aborted attempt do not free what others may get.
    state.step(all_kv(FIRST), 0.0)
    assert state.pool.counts().quarantined == 2
    state.step(PrefillStopped(attempt_id="another"), 0.0)
    assert state.pool.counts().quarantined == 2
    state.step(PrefillStopped(attempt_id=FIRST), 0.0)
    assert state.pool.num_free == 20


def test_kv_that_does_not_come_fails_the_request_in_time() -> None:
    state = brought_to("prefilled")
    assert state.step(Tick(), now=5.0) == []
    quarantine, failure = state.step(Tick(), now=5.01)
    assert quarantine == quarantined(FIRST)
    assert isinstance(failure, Failed)
    assert (failure.code, failure.attempt_id) == ("UNAVAILABLE", FIRST)
    assert state.requests == {}


def test_kv_that_keeps_coming_may_take_its_time() -> None:
    state = brought_to("prefilled")
    for page in range(2):
        now = 4.0 * (page + 1)
        assert state.step(KvNotice(FIRST, 0, 1, page, 1), now) == []
        assert state.step(Tick(), now + 5.0) == []
    _, failure = state.step(Tick(), now=13.01)
    assert isinstance(failure, Failed)


def test_prefill_itself_may_take_its_time() -> None:
    state = brought_to("full_kv")
    assert state.step(Tick(), now=1000.0) == []
    assert phase_of(state) is P


def test_wrong_pages_in_a_notice_fail_the_request() -> None:
    state = brought_to("prefilling")
    quarantine, failure = state.step(KvNotice(FIRST, 0, 9, 0, 1), now=0.0)
    assert quarantine == quarantined(FIRST)
    assert isinstance(failure, Failed)
    assert "wrong pages" in failure.message
    assert state.totals.kv_failures == 1


def test_kv_that_comes_behind_the_first_token_was_waited_for() -> None:
    state = brought_to("prefilling")
    state.step(prefilled(FIRST), 2.0)
    state.step(all_kv(FIRST), 2.5)
    assert phase_of(state) is R
    assert state.kv_waits == [0.5]


def test_tokens_and_bytes_are_counted_once_for_each_attempt_that_arrived() -> None:
    state = brought_to("running")
    assert (state.totals.tokens_transferred, state.totals.tokens_generated) == (6, 1)
    assert (state.totals.kv_bytes, state.totals.kv_failures) == (1000, 0)
    assert state.kv_waits == [0.0]
    for event in (Preempt("a"), Admit("a"), all_kv(SECOND), prefilled(SECOND)):
        state.step(event, 0.0)
    assert (state.totals.tokens_transferred, state.totals.tokens_generated) == (6 + 7, 2)


def test_growth_adds_pages_in_order() -> None:
    state = brought_to("running")
    before = list(state.requests["a"].pages)
    state.step(Grow("a"), 0.0)
    assert len(state.requests["a"].pages) == 3
    assert state.requests["a"].pages[:2] == before
    assert state.pool.pages(FIRST) == tuple(state.requests["a"].pages)


def test_pages_are_free_when_the_last_step_that_writes_to_them_has_landed() -> None:
    state = brought_to("stepping")
    assert state.step(LAUNCH, 0.0) == []
    assert state.step(ENDS, 0.0) == [token(EOS, Finish.STOP)]
    assert state.requests == {}
    assert state.pool.num_free == 20 - 2
    assert state.step(GOES_ON, 0.0) == []
    assert state.pool.num_free == 20
    assert state.totals.tokens_generated == 2  # the first one, and the end


def test_a_new_attempt_gets_other_pages_than_those_still_written_to() -> None:
    state = brought_to("preempted_ahead")
    old = state.pool.pages(FIRST)
    assert len(old) == 2
    state.step(Admit("a"), 0.0)
    assert not set(old) & set(state.requests["a"].pages)
    state.step(GOES_ON, 0.0)
    assert state.pool.pages(FIRST) == ()
    assert (state.requests["a"].num_tokens, state.requests["a"].last_token_id) == (7, OTHER)
    assert state.pool.num_free == 20 - 2


def test_the_planner_counts_what_is_in_flight() -> None:
    state = make_state()
    state.step(submit("a", max_tokens=3), 0.0)
    for event in (Admit("a"), all_kv(FIRST), prefilled(FIRST)):
        state.step(event, 0.0)

    def running() -> list[tuple[int, int]]:
        snapshot = state.snapshot()
        views = [(view.num_tokens, snapshot.num_landing) for view in snapshot.running]
        return views or [(0, snapshot.num_landing)]

    assert running() == [(7, 0)]
    state.step(LAUNCH, 0.0)
    assert running() == [(8, 0)]
    state.step(LAUNCH, 0.0)
    assert running() == [(0, 1)]  # its third and last token is in flight
    state.step(GOES_ON, 0.0)
    assert running() == [(0, 1)]
    assert state.step(GOES_ON, 0.0) == [token(OTHER, Finish.LENGTH)]
    assert running() == [(0, 0)]


def test_right_drafts_are_told_before_a_token_that_the_grammar_refuses() -> None:
    state = make_state()
    for event in (*RUNNING, LAUNCH):
        state.step(event, 0.0)
    history = Mock(spec=History, is_complete=False, match=None)
    history.append.side_effect = [True, False]
    state.requests["a"].history = history
    tokens = tuple(TokenOut(token_id=token_id) for token_id in (OTHER, OTHER + 1))
    produced, failed = state.step(Landed((Outcome(tokens, num_proposed=2),)), 0.0)
    assert isinstance(produced, Produced)
    assert (produced.tokens, produced.finish) == (tokens[:1], Finish.NONE)
    assert isinstance(failed, Failed)
    assert failed.code == "INVALID_ARGUMENT"
    assert state.requests == {}
