"""The state machine: every phase meets every event that can come, in any order."""

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.token_ids import pack_ids
from engine.link.messages import (
    Failed,
    KvTarget,
    Prefilled,
    Stopped,
    SubmitPrefill,
    TokenOut,
)
from prefill_worker.attempt import AttemptPhase
from prefill_worker.events import (
    AbortAsked,
    Action,
    Advanced,
    Arrived,
    Die,
    PushBegan,
    PushEnded,
    PushFailed,
    PushWithdrawn,
    Release,
    ReleasePeer,
    Sampled,
    Send,
    Started,
    Ticked,
    Withdraw,
)
from prefill_worker.state import RELEASE_STALL_SECONDS, TRANSFER_STALL_SECONDS, PrefillState

TOKEN = TokenOut(token_id=7)


def submit(attempt_id: str, num_tokens: int = 10, agent: bytes = b"") -> SubmitPrefill:
    return SubmitPrefill(
        request_id=f"request of {attempt_id}",
        attempt_id=attempt_id,
        token_ids=pack_ids(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=b"",
        target=KvTarget(agent=agent, runs=(), kv_fingerprint=""),
    )


def sent(actions: list[Action]) -> list[str]:
    """Class names of messages and of other actions, in order."""
    return [
        type(action.message).__name__ if isinstance(action, Send) else type(action).__name__
        for action in actions
    ]


def in_phase(phase: AttemptPhase, num_in_flight: int = 0) -> PrefillState:
    """A machine with attempt "a", 10 tokens, in the given phase."""
    state = PrefillState(max_waiting=4)
    state.step(Arrived(submit("a")), 1.0)
    if phase is AttemptPhase.WAITING:
        return state
    state.step(Started("a", 4), 2.0)
    for _ in range(num_in_flight):
        state.step(PushBegan("a", 100), 3.0)
    if phase is AttemptPhase.PUSHING:
        state.step(Advanced("a", 10, 0.5), 4.0)
        state.step(Sampled("a", TOKEN), 4.0)
    elif phase is AttemptPhase.STOPPING:
        state.step(AbortAsked("a"), 4.0)
    assert state["a"].phase is phase
    return state


def test_a_life_without_trouble() -> None:
    state = in_phase(AttemptPhase.RUNNING, num_in_flight=2)
    assert state.step(PushEnded("a"), 4.0) == []
    assert state.step(Advanced("a", 8, 0.25), 5.0) == []
    assert state["a"].num_left_tokens == 2
    state.step(PushBegan("a", 11), 5.5)
    state.step(Advanced("a", 10, 0.5), 6.0)
    (answer,) = state.step(Sampled("a", TOKEN), 7.0)
    assert answer == Send(
        Prefilled(
            request_id="request of a",
            attempt_id="a",
            token=TOKEN,
            num_cached_tokens=4,
            num_computed_tokens=6,
            kv_bytes=211,
            queue_seconds=1.0,
            compute_seconds=0.75,
            transfer_seconds=4.0,
        )
    )
    assert state.step(PushEnded("a"), 8.0) == []
    assert state.step(PushEnded("a"), 8.0) == [Release("a")]
    assert len(state) == 0


def test_an_attempt_whose_transfers_are_over_already_ends_with_its_answer() -> None:
    state = in_phase(AttemptPhase.RUNNING, num_in_flight=1)
    assert state.step(PushEnded("a"), 4.0) == []
    state.step(Advanced("a", 10, 0.5), 5.0)
    assert sent(state.step(Sampled("a", TOKEN), 5.0)) == ["Prefilled", "Release"]


@pytest.mark.parametrize(
    ("phase", "num_in_flight"),
    [
        (AttemptPhase.WAITING, 0),
        (AttemptPhase.RUNNING, 0),
        (AttemptPhase.RUNNING, 2),
        (AttemptPhase.PUSHING, 1),
        (AttemptPhase.STOPPING, 2),
    ],
)
def test_an_abort_is_confirmed_once_nothing_is_in_flight(
    phase: AttemptPhase, num_in_flight: int
) -> None:
    state = in_phase(phase, num_in_flight)
    actions = state.step(AbortAsked("a"), 9.0)
    for index in range(num_in_flight):
        assert actions == ([] if index else [Withdraw("a")])
        assert state["a"].phase is AttemptPhase.STOPPING
        actions = state.step(PushEnded("a"), 10.0)
    assert actions == [Release("a"), Send(Stopped(attempt_id="a", was_known=True))]
    assert len(state) == state.num_waiting == 0


def test_what_is_withdrawn_in_line_is_no_failure_and_no_progress() -> None:
    state = in_phase(AttemptPhase.STOPPING, num_in_flight=3)
    moved_at = state["a"].peer.moved_at
    assert state.step(PushWithdrawn("a"), 9.0) == state.step(PushWithdrawn("a"), 9.0) == []
    assert state["a"].peer.moved_at == moved_at
    assert state.step(PushEnded("a"), 10.0) == [
        Release("a"),
        Send(Stopped(attempt_id="a", was_known=True)),
    ]


def test_an_abort_of_an_unknown_attempt_is_confirmed_at_once() -> None:
    state = in_phase(AttemptPhase.RUNNING)
    assert state.step(AbortAsked("b"), 9.0) == [Send(Stopped(attempt_id="b", was_known=False))]


@pytest.mark.parametrize(
    "phase", [AttemptPhase.RUNNING, AttemptPhase.PUSHING, AttemptPhase.STOPPING]
)
def test_a_failed_transfer_ends_the_attempt_when_the_others_are_over(phase: AttemptPhase) -> None:
    state = in_phase(phase, num_in_flight=2)
    assert state.step(PushEnded("a", "connection lost"), 5.0) == [Withdraw("a")]
    actions = state.step(PushEnded("a"), 5.0)
    assert sent(actions)[:2] == ["Release", "Failed"]
    failure = actions[1]
    assert isinstance(failure, Send)
    assert isinstance(failure.message, Failed)
    assert failure.message.code == "UNAVAILABLE"
    assert "connection lost" in failure.message.message
    assert ("Stopped" in sent(actions)) == (phase is AttemptPhase.STOPPING)


def test_a_step_that_outlives_its_attempt_changes_nothing() -> None:
    state = in_phase(AttemptPhase.RUNNING, num_in_flight=1)
    assert state.step(PushFailed("a", "no such peer"), 5.0) == [Withdraw("a")]
    assert state.step(Advanced("a", 10, 0.5), 5.0) == []
    assert state.step(Sampled("a", TOKEN), 5.0) == []
    assert sent(state.step(PushEnded("a"), 5.0)) == ["Release", "Failed"]
    assert state.step(Advanced("a", 10, 0.5), 5.0) == []
    assert state.step(Sampled("a", TOKEN), 5.0) == []


def test_the_queue_is_bounded() -> None:
    state = PrefillState(max_waiting=2)
    for name in "ab":
        assert state.step(Arrived(submit(name)), 0.0) == []
    (refusal,) = state.step(Arrived(submit("c")), 0.0)
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, Failed)
    assert refusal.message.code == "RESOURCE_EXHAUSTED"
    state.step(Started("a", 0), 0.0)
    assert state.step(Arrived(submit("c")), 0.0) == []
    assert [attempt.submit.attempt_id for attempt in state] == ["a", "b", "c"]


def test_the_same_attempt_twice_is_refused_and_the_first_goes_on() -> None:
    state = in_phase(AttemptPhase.RUNNING)
    assert sent(state.step(Arrived(submit("a")), 3.0)) == ["Failed"]
    assert state["a"].phase is AttemptPhase.RUNNING


def ticks(state: PrefillState, begin: float, seconds: float, every: float = 0.1) -> list[Action]:
    """What looking so often for so long brings; stops at the first action."""
    for index in range(round(seconds / every) + 1):
        actions = state.step(Ticked(), begin + index * every)
        if actions:
            return actions
    return []


def test_a_transfer_that_hangs_costs_its_peer_and_at_last_the_process() -> None:
    state = in_phase(AttemptPhase.PUSHING, num_in_flight=1)
    assert ticks(state, 10.0, TRANSFER_STALL_SECONDS - 0.1) == []
    assert ticks(state, 10.0 + TRANSFER_STALL_SECONDS, 0.2) == [ReleasePeer("a")]
    late = 10.2 + TRANSFER_STALL_SECONDS
    assert ticks(state, late, RELEASE_STALL_SECONDS - 0.2) == []
    (death,) = ticks(state, late + RELEASE_STALL_SECONDS, 0.2)
    assert isinstance(death, Die)
    assert sent(state.step(PushEnded("a", "released"), 30.0)) == ["Release", "Failed"]
    assert ticks(state, 40.0, 10.0) == []


def test_progress_and_long_steps_are_no_stall() -> None:
    state = in_phase(AttemptPhase.PUSHING, num_in_flight=3)
    for begin in (10.0, 14.0):
        assert ticks(state, begin, TRANSFER_STALL_SECONDS - 0.2) == []
        assert state.step(PushEnded("a"), begin + 3.9) == []
    assert state.step(Ticked(), 100.0) == []  # a step of 82 seconds, then one look
    assert ticks(state, 100.0, TRANSFER_STALL_SECONDS) == [ReleasePeer("a")]


def test_who_waits_behind_others_of_the_same_peer_is_not_stalled() -> None:
    state = PrefillState(max_waiting=4)
    for name, agent in (("first", b"busy"), ("second", b"busy"), ("other", b"hung")):
        state.step(Arrived(submit(name, agent=agent)), 1.0)
        state.step(Started(name, 4), 2.0)
        for _ in range(4):
            state.step(PushBegan(name, 100), 3.0)
    state.step(Ticked(), 10.0)
    assert ticks(state, 10.0, 3.0) == []
    assert state.step(PushEnded("first"), 13.0) == []
    assert ticks(state, 13.0, 3.0) == [ReleasePeer("other")]
    for _ in range(4):
        state.step(PushEnded("other", "released"), 14.5)
    assert ticks(state, 14.5, 2.0) == []
    state.step(PushEnded("first", "lost"), 16.5)  # a failure is no progress
    assert ticks(state, 16.5, 1.0) == [ReleasePeer("second")]


class AttemptsMachine(RuleBasedStateMachine):
    """Random lives of several attempts; checks what every observer relies on."""

    NAMES: ClassVar = [f"a{i}" for i in range(6)]

    def __init__(self) -> None:
        super().__init__()
        self.state = PrefillState(max_waiting=3)
        self.holding: set[str] = set()
        self.num_aborts: dict[str, int] = {}
        self.now = 0.0

    names = st.sampled_from(NAMES)

    def do(self, *events: object) -> None:
        for event in events:
            self.now += 0.01
            for action in self.state.step(event, self.now):  # type: ignore[arg-type]
                self.check(action)

    def check(self, action: Action) -> None:
        if isinstance(action, Release):
            assert action.attempt_id not in self.state
            self.holding.discard(action.attempt_id)
        if isinstance(action, Send) and isinstance(action.message, Stopped):
            # Nothing in flight, pages given back, and somebody has asked.
            name = action.message.attempt_id
            assert name not in self.state
            assert name not in self.holding
            assert self.num_aborts.pop(name)

    def those(self, *phases: AttemptPhase, in_flight: bool = False) -> list[str]:
        return [
            attempt.submit.attempt_id
            for attempt in self.state
            if attempt.phase in phases and (attempt.num_in_flight or not in_flight)
        ]

    @rule(name=names)
    def arrive(self, name: str) -> None:
        known, num_waiting = name in self.state, self.state.num_waiting
        self.do(Arrived(submit(name)))
        assert (name in self.state) == (known or num_waiting < 3)

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.num_aborts[name] = self.num_aborts.get(name, 0) + 1
        self.do(AbortAsked(name))

    @precondition(lambda self: self.those(AttemptPhase.WAITING))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.those(AttemptPhase.WAITING)))
        self.holding.add(name)
        self.do(Started(name, 0))

    @precondition(lambda self: self.those(AttemptPhase.RUNNING))
    @rule(data=st.data(), outcome=st.sampled_from(["began", "failed", "both"]))
    def push(self, data: st.DataObject, outcome: str) -> None:
        name = data.draw(st.sampled_from(self.those(AttemptPhase.RUNNING)))
        if outcome != "failed":
            self.do(PushBegan(name, 1))
        if outcome != "began":
            self.do(PushFailed(name, "gone"))

    @precondition(lambda self: self.those(AttemptPhase.RUNNING))
    @rule(data=st.data(), num_tokens=st.integers(1, 10))
    def advance(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(self.those(AttemptPhase.RUNNING)))
        num_done = min(10, self.state[name].num_done_tokens + num_tokens)
        self.do(Advanced(name, num_done, 0.1))
        if num_done == 10:
            self.do(Sampled(name, TOKEN))

    @precondition(lambda self: self.those(*AttemptPhase, in_flight=True))
    @rule(data=st.data(), error=st.sampled_from(["", "lost"]))
    def end_push(self, data: st.DataObject, error: str) -> None:
        name = data.draw(st.sampled_from(self.those(*AttemptPhase, in_flight=True)))
        self.do(PushEnded(name, error))

    @precondition(lambda self: self.those(AttemptPhase.STOPPING))
    @rule(data=st.data())
    def withdraw_push(self, data: st.DataObject) -> None:
        self.do(PushWithdrawn(data.draw(st.sampled_from(self.those(AttemptPhase.STOPPING)))))

    @invariant()
    def only_what_lives_holds_pages(self) -> None:
        held = self.those(AttemptPhase.RUNNING, AttemptPhase.PUSHING, AttemptPhase.STOPPING)
        assert set(held) == self.holding
        assert self.state.num_waiting == len(self.those(AttemptPhase.WAITING)) <= 3
        for attempt in self.state:
            assert (
                attempt.phase not in (AttemptPhase.PUSHING, AttemptPhase.STOPPING)
                or attempt.num_in_flight
            )

    def teardown(self) -> None:
        """From wherever it is, everything ends once transfers do."""
        for name in self.those(AttemptPhase.WAITING, AttemptPhase.RUNNING):
            self.abort(name)
        while len(self.state):
            self.do(PushEnded(next(iter(self.state)).submit.attempt_id))
        assert not self.holding
        assert not self.num_aborts


TestAttemptsMachine = AttemptsMachine.TestCase
TestAttemptsMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
