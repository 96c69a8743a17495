"""The books of a rank over long random walks, with steps launched ahead, or with drafts, some of
them right, or neither: nothing leaks, nobody is stuck, and every request gets its own tokens, each
once."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.events import Admit, Event, Grow, Landed, Launched, Outcome, Preempt, Tick
from decode_worker.inflight_step import next_chunk, outcome_of
from decode_worker.plan import plan
from decode_worker.request import Request
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
    Reserved,
    TokenOut,
)
from tests.decode_worker.books import EOS, FACTS, all_kv, make_state, prefilled, submit


def token_behind(name: str, num_tokens: int) -> int:
    """What the model says behind so many tokens of a request; now and then that it ends."""
    number = int(name[1:]) * 31 + num_tokens
    return EOS if number % 11 == 0 else 100 + number


def whole_output(name: str, num_tokens: int, max_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < max_tokens and EOS not in output:
        output.append(token_behind(name, num_tokens + len(output)))
    return output


class Walk:
    """Drives a state as loop, front, prefill peers and transfer would, in random order. `ahead`:
    a step lands behind the launch of the next one."""

    def __init__(self, num_pages: int, ahead: bool, num_drafts: int) -> None:
        self.state = make_state(num_pages, num_drafts)
        self.num_pages = num_pages
        self.ahead = ahead
        self.now = 0.0
        self.attempts: dict[str, Reserved] = {}
        self.quarantines: set[str] = set()
        self.open: set[str] = set()
        self.num_submitted = 0
        self.outputs: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        # What is on its way, and the pages that its step writes to, by attempt.
        self.inflight_steps: deque[tuple[tuple[Outcome, ...], dict[str, tuple[int, ...]]]] = deque()

    def do(self, event: Event) -> None:
        for message in self.state.step(event, self.now):
            match message:
                case Reserved():
                    self.attempts[message.attempt_id] = message
                case Quarantined():
                    assert message.attempt_id in self.attempts
                    self.quarantines.add(message.attempt_id)
                case Produced():
                    self.hear(message)
                case Ended() | Failed():
                    self.open.discard(message.request_id)
        self.state.pool.check_integrity()
        assert self.open == set(self.state.requests)
        assert self.state.pool.counts().quarantined == sum(
            len(pages_of(self.attempts[attempt].target.runs)) for attempt in self.quarantines
        )
        for _, written in self.inflight_steps:
            for attempt_id, pages in written.items():
                # Nobody else's, and not free.
                assert self.state.pool.pages(attempt_id)[: len(pages)] == pages

    def hear(self, message: Produced) -> None:
        name = message.request_id
        assert name in self.open
        output, expected = self.outputs[name], self.expected[name]
        output += [token.token_id for token in message.tokens]
        assert output == expected[: len(output)]
        if message.finish is not Finish.NONE:
            assert output == expected
            self.open.discard(name)

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        self.num_submitted += 1
        name = f"r{self.num_submitted}"
        self.open.add(name)
        self.outputs[name] = []
        self.expected[name] = whole_output(name, num_tokens, max_tokens)
        self.do(submit(name, num_tokens, max_tokens))

    def turn(self) -> tuple[str, ...]:
        decided = plan(self.state.snapshot())
        if decided.preempt and self.inflight_steps:
            # As the loop does: the plan wants pages that nobody writes to any more.
            while self.inflight_steps:
                self.land()
            decided = plan(self.state.snapshot())
        for name in decided.preempt:
            self.do(Preempt(name))
        for name in decided.grow:
            self.do(Grow(name))
        for name in decided.admit:
            self.do(Admit(name))
        return decided.step

    def launch(self) -> None:
        names = self.turn()
        outcomes, written = [], {}
        for name in names:
            request = self.state.requests[name]
            assert request.attempt is not None
            num_tokens = request.num_tokens + sum(
                request.attempt.attempt_id in pages for _, pages in self.inflight_steps
            )
            outcomes.append(self.outcome(request, num_tokens))
            written[request.attempt.attempt_id] = tuple(request.pages)
        self.do(Launched(names))
        self.inflight_steps.append((tuple(outcomes), written))

    def outcome(self, request: Request, num_tokens: int) -> Outcome:
        """Of a step; drafts are wrong now and then."""
        facts, drafts = self.state.facts, request.drafts
        if facts.speculative_tokens:
            chunk = next_chunk(request, None, facts, facts.speculative_tokens)
            end = chunk.start + len(chunk.token_ids)
            assert end == num_tokens + len(chunk.drafts)
            assert chunk.num_seen == request.is_fresh
            drafts = tuple(chunk.drafts)
        assert len(request.pages) * FACTS.page_tokens >= num_tokens + len(drafts)
        names = range(num_tokens, num_tokens + len(drafts) + 1 + facts.speculative_tokens)
        behind = [token_behind(request.request_id, number) for number in names]
        sampled = [TokenOut(token_id=token) for token in behind[: len(drafts) + 1]]
        made = outcome_of(drafts, sampled, ())
        guesses = behind[len(made.tokens) :][: facts.speculative_tokens]
        return replace(made, drafts=tuple(token + (token % 5 == 0) for token in guesses))

    def land(self) -> None:
        if self.inflight_steps:
            outcomes, _ = self.inflight_steps.popleft()
            self.do(Landed(outcomes))

    def forward(self) -> None:
        self.launch()
        while len(self.inflight_steps) > self.ahead:
            self.land()

    def some_attempt(self, choice: int) -> Reserved | None:
        attempts = list(self.attempts.values())
        return attempts[choice % len(attempts)] if attempts else None

    def prefill(self, attempt: Reserved) -> None:
        name = attempt.request_id
        request = self.state.requests.get(name)  # it may be over, and its attempt still known
        token_id = token_behind(name, request.num_tokens) if request else EOS
        self.do(prefilled(attempt.attempt_id, token_id, request_id=name))

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
                pages = len(pages_of(attempt.target.runs))
                self.do(all_kv(attempt.attempt_id, pages))
                self.prefill(attempt)
            self.attempts = {a: r for a, r in self.attempts.items() if a in self.quarantines}
            self.forward()
        assert not self.state.requests, "a request is stuck"
        while self.inflight_steps:
            self.land()
        self.stop_all_prefills()
        assert self.state.pool.num_free == self.num_pages


ACTIONS: dict[str, Callable[[Walk, int], None]] = {
    "submit": lambda walk, n: walk.submit(1 + n % 20, 1 + n % 12),
    "forward": lambda walk, n: walk.forward(),
    "land": lambda walk, n: walk.land(),
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
    pages = len(pages_of(attempt.target.runs))
    match action:
        case "kv":
            walk.do(all_kv(attempt.attempt_id, pages))
        case "some_kv":
            walk.do(KvNotice(attempt.attempt_id, n % 2, 1, n % pages, 1))
        case "prefilled":
            walk.prefill(attempt)
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
    ahead=st.booleans(),
    num_drafts=st.integers(0, 5),
    actions=st.lists(
        st.tuples(
            st.sampled_from([*ACTIONS, *OTHERS, "submit", "forward", "kv", "prefilled"]),
            st.integers(0, 1000),
        ),
        max_size=60,
    ),
)
def test_nothing_leaks_and_nobody_is_stuck(
    num_pages: int, ahead: bool, num_drafts: int, actions: list[tuple[str, int]]
) -> None:
    walk = Walk(num_pages, ahead and not num_drafts, num_drafts)
    for action, n in actions:
        if action in ACTIONS:
            ACTIONS[action](walk, n)
        else:
            on_attempt(walk, action, n)
    walk.finish()
