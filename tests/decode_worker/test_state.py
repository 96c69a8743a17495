"""The books of a rank: every event in every phase, then long random walks."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.events import Admit, Event, Grow, Preempt, RankFacts, Sampled, Tick
from decode_worker.plan import plan
from decode_worker.request import Phase
from decode_worker.state import RankState
from engine.kv_notice import KvNotice
from engine.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    Prefilled,
    PrefillStopped,
    Produced,
    Quarantined,
    RankMessage,
    Reserved,
    Sampling,
    Submit,
    TokenOut,
)
from engine.pages import PagePool, pages_of

FACTS = RankFacts(
    num_layers=2,
    page_tokens=4,
    max_model_len=64,
    max_running=8,
    eos_token_ids=(2,),
    kv_arrival_seconds=5.0,
    agent=b"agent",
    kv_fingerprint="f",
    attempt_prefix="e-0",
)
EOS, OTHER = 2, 7


def make_state(num_pages: int = 20) -> RankState:
    return RankState(FACTS, PagePool(num_pages))


def submit(request_id: str, num_tokens: int = 6, max_tokens: int = 10) -> Submit:
    return Submit(
        request_id=request_id,
        token_ids=tuple(range(10, 10 + num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=Sampling(max_tokens=max_tokens),
    )


def prefilled(attempt_id: str, token_id: int = OTHER, request_id: str = "a") -> Prefilled:
    return Prefilled(
        request_id=request_id,
        attempt_id=attempt_id,
        token=TokenOut(token_id=token_id),
        num_cached_tokens=0,
        num_computed_tokens=6,
        kv_bytes=1000,
        queue_seconds=0.0,
        compute_seconds=0.0,
        transfer_seconds=0.5,
    )


def all_kv(attempt_id: str, num_pages: int = 2) -> KvNotice:
    return KvNotice(attempt_id, 0, FACTS.num_layers, 0, num_pages)


FIRST, SECOND = "e-0-1", "e-0-2"
WAITING: tuple[Event, ...] = (submit("a"),)
PREFILLING: tuple[Event, ...] = (*WAITING, Admit("a"))
HALF_KV: tuple[Event, ...] = (*PREFILLING, KvNotice(FIRST, 0, 1, 0, 2))
FULL_KV: tuple[Event, ...] = (*PREFILLING, all_kv(FIRST))
PREFILLED: tuple[Event, ...] = (*PREFILLING, prefilled(FIRST))
RUNNING: tuple[Event, ...] = (*FULL_KV, prefilled(FIRST))
PREEMPTED: tuple[Event, ...] = (*RUNNING, Preempt("a"))
AGAIN: tuple[Event, ...] = (*PREEMPTED, Admit("a"))
OVER: tuple[Event, ...] = (*RUNNING, Sampled("a", TokenOut(token_id=EOS)))
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
}


def brought_to(name: str) -> RankState:
    state = make_state()
    for event in STATES[name]:
        state.step(event, now=0.0)
    return state


def phase_of(state: RankState) -> Phase | None:
    request = state.requests.get("a")
    return None if request is None else request.phase


def token(token_id: int, finish: Finish = Finish.NONE) -> Produced:
    return Produced(request_id="a", tokens=(TokenOut(token_id=token_id),), finish=finish)


def failed(attempt_id: str) -> Failed:
    return Failed(request_id="a", attempt_id=attempt_id, code="UNAVAILABLE", message="gone")


def quarantined(attempt_id: str) -> Quarantined:
    return Quarantined(request_id="a", attempt_id=attempt_id)


W, P, R = Phase.WAITING, Phase.PREFILLING, Phase.RUNNING
ENDED = Ended(request_id="a")

# state, event, phase after it, what the front hears. Whatever is not listed changes nothing.
TRANSITIONS: list[tuple[str, Event, Phase | None, list[RankMessage]]] = [
    ("nothing", submit("a"), W, []),
    ("waiting", Abort(request_id="a"), None, [ENDED]),
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
    ("running", Sampled("a", TokenOut(token_id=OTHER)), R, [token(OTHER)]),
    ("running", Sampled("a", TokenOut(token_id=EOS)), None, [token(EOS, Finish.STOP)]),
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
    Abort(request_id="a"),
    Abort(request_id="b"),
    PrefillStopped(attempt_id=FIRST),
    Preempt("a"),
    Sampled("a", TokenOut(token_id=OTHER)),
    Tick(),
]
# Admit and Grow are the planner's: it gives them only where there are pages.


@pytest.mark.parametrize(
    ("name", "event", "phase", "heard"), TRANSITIONS, ids=lambda value: str(value)[:30]
)
def test_transition(name: str, event: Event, phase: Phase | None, heard: list[RankMessage]) -> None:
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


def test_reserved_carries_the_pages_and_all_tokens_so_far() -> None:
    state = make_state()
    state.step(submit("a"), 0.0)
    (reserved,) = state.step(Admit("a"), 0.0)
    assert isinstance(reserved, Reserved)
    assert reserved.token_ids == tuple(range(10, 16))
    assert len(pages_of(reserved.sink.runs)) == 2
    assert (reserved.sink.agent, reserved.sink.kv_fingerprint) == (b"agent", "f")
    for event in (all_kv(FIRST), prefilled(FIRST), Sampled("a", TokenOut(token_id=8))):
        state.step(event, 0.0)
    state.step(Preempt("a"), 0.0)
    assert state.pool.num_free == 20
    (again,) = state.step(Admit("a"), 0.0)
    assert isinstance(again, Reserved)
    assert again.token_ids == (*range(10, 16), OTHER, 8)
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


def test_tokens_and_bytes_are_counted_once_for_each_attempt_that_arrived() -> None:
    state = brought_to("running")
    assert (state.totals.tokens_transferred, state.totals.tokens_generated) == (6, 1)
    assert (state.totals.kv_bytes, state.totals.kv_seconds) == (1000, 0.5)
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


class Walk:
    """Drives a state as loop, front, prefill peers and transfer would, in random order."""

    def __init__(self, num_pages: int) -> None:
        self.state = make_state(num_pages)
        self.num_pages = num_pages
        self.now = 0.0
        self.attempts: dict[str, Reserved] = {}
        self.quarantines: set[str] = set()
        self.open: set[str] = set()
        self.num_submitted = 0
        self.outputs: dict[str, int] = {}

    def do(self, event: Event) -> None:
        for message in self.state.step(event, self.now):
            match message:
                case Reserved():
                    self.attempts[message.attempt_id] = message
                case Quarantined():
                    assert message.attempt_id in self.attempts
                    self.quarantines.add(message.attempt_id)
                case Produced():
                    assert message.request_id in self.open
                    self.outputs[message.request_id] += len(message.tokens)
                    if message.finish is not Finish.NONE:
                        self.open.discard(message.request_id)
                case Ended() | Failed():
                    self.open.discard(message.request_id)
        self.state.pool.check_integrity()
        assert self.open == set(self.state.requests)
        assert self.state.pool.counts().quarantined == sum(
            len(pages_of(self.attempts[attempt].sink.runs)) for attempt in self.quarantines
        )

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        self.num_submitted += 1
        name = f"r{self.num_submitted}"
        self.open.add(name)
        self.outputs[name] = 0
        self.do(submit(name, num_tokens, max_tokens))

    def turn(self) -> list[str]:
        decided = plan(self.state.snapshot())
        for name in decided.preempt:
            self.do(Preempt(name))
        for name in decided.grow:
            self.do(Grow(name))
        for name in decided.admit:
            self.do(Admit(name))
        return list(decided.step)

    def forward(self, token_id: int) -> None:
        for name in self.turn():
            request = self.state.requests[name]
            assert len(request.pages) * FACTS.page_tokens >= len(request.tokens)
            self.do(Sampled(name, TokenOut(token_id=token_id)))

    def some_attempt(self, choice: int) -> Reserved | None:
        attempts = list(self.attempts.values())
        return attempts[choice % len(attempts)] if attempts else None

    def stop_all_prefills(self) -> None:
        for attempt in list(self.quarantines):
            self.quarantines.discard(attempt)
            self.do(PrefillStopped(attempt_id=attempt))

    def finish(self) -> None:
        """Everything that is promised comes true; then nobody may be left."""
        for _ in range(2000):
            if not self.state.requests:
                break
            self.stop_all_prefills()
            for attempt in list(self.attempts.values()):
                pages = len(pages_of(attempt.sink.runs))
                self.do(all_kv(attempt.attempt_id, pages))
                self.do(prefilled(attempt.attempt_id, request_id=attempt.request_id))
            self.attempts = {a: r for a, r in self.attempts.items() if a in self.quarantines}
            self.forward(OTHER)
        assert not self.state.requests, "a request is stuck"
        self.stop_all_prefills()
        assert self.state.pool.num_free == self.num_pages


ACTIONS: dict[str, Callable[[Walk, int], None]] = {
    "submit": lambda walk, n: walk.submit(1 + n % 20, 1 + n % 12),
    "forward": lambda walk, n: walk.forward(OTHER),
    "eos": lambda walk, n: walk.forward(EOS),
    "turn": lambda walk, n: [None for _ in walk.turn()] and None,
    "clock": lambda walk, n: setattr(walk, "now", walk.now + n % 7),
    "tick": lambda walk, n: walk.do(Tick()),
    "abort": lambda walk, n: walk.do(Abort(request_id=f"r{n % (walk.num_submitted + 2)}")),
    "stopped": lambda walk, n: walk.stop_all_prefills(),
}


def on_attempt(walk: Walk, action: str, n: int) -> None:
    attempt = walk.some_attempt(n)
    if attempt is None:
        return
    pages = len(pages_of(attempt.sink.runs))
    match action:
        case "kv":
            walk.do(all_kv(attempt.attempt_id, pages))
        case "some_kv":
            walk.do(KvNotice(attempt.attempt_id, n % 2, 1, n % pages, 1))
        case "prefilled":
            walk.do(prefilled(attempt.attempt_id, request_id=attempt.request_id))
        case "failed":
            message = Failed(
                request_id=attempt.request_id,
                attempt_id=attempt.attempt_id,
                code="UNAVAILABLE",
                message="x",
            )
            walk.do(message)


OTHERS = ["kv", "some_kv", "prefilled", "failed"]


@settings(max_examples=120, deadline=None)
@given(
    num_pages=st.integers(8, 14),
    actions=st.lists(
        st.tuples(
            st.sampled_from([*ACTIONS, *OTHERS, "submit", "forward", "kv", "prefilled"]),
            st.integers(0, 1000),
        ),
        max_size=60,
    ),
)
def test_nothing_leaks_and_nobody_is_stuck(num_pages: int, actions: list[tuple[str, int]]) -> None:
    walk = Walk(num_pages)
    for action, n in actions:
        if action in ACTIONS:
            ACTIONS[action](walk, n)
        else:
            on_attempt(walk, action, n)
    walk.finish()
