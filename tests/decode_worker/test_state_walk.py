"""The books of a rank over long random walks: nothing leaks, nobody is stuck."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.events import Admit, Event, Grow, Preempt, Sampled, Tick
from decode_worker.plan import plan
from engine.kv_notice import KvNotice
from engine.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    PrefillStopped,
    Produced,
    Quarantined,
    Reserved,
    TokenOut,
)
from engine.pages import pages_of
from tests.decode_worker.books import EOS, FACTS, OTHER, all_kv, make_state, prefilled, submit


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
