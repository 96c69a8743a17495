"""Prefill on one rank: performs what `state` and `plan` decide.

A turn hears the front and the transfer, plans, reserves pages and pushes known prefixes; a pass
pushes layer by layer while it is computed. Idle ranks look after transfers in flight.
"""

import msgspec

from core.clock import Clock
from core.errors import EpserveError, InvalidRequest
from core.log import get_logger
from core.token_ids import unpack_ids
from engine.grammar.grammars import GRAMMAR_POLL_SECONDS
from engine.link.messages import Abort, Failed, RankMessage, RankStats, SubmitPrefill
from engine.rank_loop import IDLE_SECONDS, RankLoop
from engine.start.rank import RankContext
from engine.step.sequence_chunk import SequenceChunk
from prefill_worker.attempt import Attempt, AttemptPhase
from prefill_worker.events import (
    AbortAsked,
    Action,
    Advanced,
    Arrived,
    Die,
    Event,
    Refused,
    Release,
    ReleasePeer,
    Sampled,
    Send,
    Started,
    Ticked,
    Withdraw,
)
from prefill_worker.first_token import FirstTokens
from prefill_worker.kv_target import KvGeometry, TargetPages, unpack_target
from prefill_worker.ledger import Ledger
from prefill_worker.plan import Candidate, Chunk, plan_chunks
from prefill_worker.push import PageRange, Pusher
from prefill_worker.state import PrefillState, failed

log = get_logger("prefill_worker.loop")

# Ends of transfers wake no loop; one that waits for nothing else looks this often.
TRANSFER_POLL_SECONDS = 0.0003
# So many of the first requests that wait are looked at in a step. Those that hold pages all are:
# they may be the ones that the first in line waits for.
PLAN_WINDOW = 64


Work = list[tuple[Chunk, SequenceChunk]]


class PrefillLoop(RankLoop[Work]):
    """One rank's loop."""

    def __init__(self, context: RankContext, clock: Clock | None = None) -> None:
        super().__init__(context, clock)
        self._context = context
        self._geometry = _geometry(context)
        self._state = PrefillState(context.settings.max_waiting)
        self._ledger = Ledger(context.pool, context.settings.page_tokens)
        self._pusher = Pusher(context.transfer, context.kv_cache, self._geometry, self._clock)
        self._targets: dict[str, TargetPages] = {}
        self._first_tokens = FirstTokens(context, self._clock)
        # Seconds, requests, tokens; not reported yet.
        self._steps: list[tuple[float, int, int]] = []
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_cached_tokens = 0
        self._news = False  # something that the front should hear of soon

    def _close(self) -> None:
        self._first_tokens.stop()

    def _turn(self) -> Work:
        for message in self._drain():
            match message:
                case SubmitPrefill():
                    self._accept(message)
                case Abort():
                    self._apply(AbortAsked(message.attempt_id))
                case _:
                    raise AssertionError(f"{type(message).__name__} is not for a prefill rank")
        refused = [
            Refused(attempt_id, error.status.grpc, error.message)
            for attempt_id, error in self._first_tokens.poll()
        ]
        self._apply(*refused, *self._pusher.poll(), Ticked())
        chunks = self._plan()
        self._begin([self._state[chunk.attempt_id] for chunk in chunks])
        # A peer that could not be reached has ended its attempts just now.
        running = [chunk for chunk in chunks if self._is_running(chunk.attempt_id)]
        return [(chunk, self._sequence_chunk(chunk)) for chunk in running]

    def _sizes(self, work: Work) -> tuple[int, int]:
        return sum(len(one.token_ids) for _, one in work), sum(one.num_rows for _, one in work)

    def _wait_seconds(self) -> float:
        if self._pusher.num_outstanding:
            return TRANSFER_POLL_SECONDS
        return GRAMMAR_POLL_SECONDS if self._first_tokens.num_waiting else IDLE_SECONDS

    def _has_news(self) -> bool:
        return self._news

    def _accept(self, submit: SubmitPrefill) -> None:
        num_tokens, pool_pages = submit.num_tokens, self._context.kv_plan.num_pages
        try:
            if not 0 < self._ledger.num_pages(num_tokens) <= pool_pages:
                raise InvalidRequest(f"{num_tokens} tokens do not fit into {pool_pages} pages")
            target = unpack_target(submit.target, num_tokens, self._geometry)
        except EpserveError as error:
            self._tell(failed(submit, error.status.grpc, error.message))
            return
        self._apply(Arrived(submit))
        if submit.attempt_id in self._state:
            self._targets.setdefault(submit.attempt_id, target)
            self._first_tokens.open(submit)

    def _plan(self) -> tuple[Chunk, ...]:
        candidates: list[Candidate] = []
        num_seen = 0  # of those that wait
        for attempt in self._state.by_priority():
            submit = attempt.submit
            if not self._first_tokens.is_ready(submit.attempt_id):
                continue
            if attempt.phase is AttemptPhase.WAITING:
                num_seen += 1
                if num_seen > PLAN_WINDOW:
                    continue
                num_done = self._num_known_tokens(submit)
                num_pages = self._ledger.num_pages(submit.num_tokens)
            elif attempt.phase is AttemptPhase.RUNNING:
                num_done, num_pages = attempt.num_done_tokens, 0
            else:
                continue
            candidates.append(
                Candidate(
                    attempt_id=submit.attempt_id,
                    num_tokens=submit.num_tokens,
                    num_done_tokens=num_done,
                    num_pages_needed=num_pages,
                    priority=submit.priority,
                )
            )
        return plan_chunks(
            candidates,
            budget_tokens=self._context.settings.step_tokens,
            page_tokens=self._geometry.page_tokens,
            num_available_pages=self._ledger.num_available,
        )

    def _num_known_tokens(self, submit: SubmitPrefill) -> int:
        """Tokens that are not computed. Log-probabilities need all."""
        if self._first_tokens.scores(submit.attempt_id) is not None:
            return 0
        return self._ledger.num_known_tokens(submit.attempt_id, submit.token_ids)

    def _begin(self, attempts: list[Attempt]) -> None:
        """Pages for those that start; what is known of them is pushed at once.

        All leases are taken before the first page is: a reservation may forget known pages,
        but then none that the plan has counted on.
        """
        known: dict[str, int] = {}
        for attempt in attempts:
            if attempt.phase is AttemptPhase.WAITING:
                submit = attempt.submit
                known[submit.attempt_id] = self._ledger.hold(
                    submit.attempt_id,
                    submit.token_ids,
                    reuse=self._first_tokens.scores(submit.attempt_id) is None,
                )
        for attempt_id, num_tokens in known.items():
            pages = self._ledger.reserve(attempt_id)
            self._pusher.open(attempt_id, self._targets[attempt_id], pages)
            self._apply(Started(attempt_id, num_tokens))
            self._num_cached_tokens += num_tokens
        for attempt_id, num_tokens in known.items():
            if num_tokens:
                num_pages = num_tokens // self._geometry.page_tokens
                self._apply(*self._pusher.push_known(attempt_id, num_pages))

    def _compute(
        self, work: Work, began: float, tokens_per_rank: tuple[int, ...], rows: tuple[int, ...]
    ) -> None:
        began = self._clock.now()  # without what the other ranks were waited for
        push = self._pusher.begin_step([self._page_range(chunk) for chunk, _ in work])
        # A GPU computes layers long after they are enqueued: they leave while it does.
        tokens = self._runner.step(
            [one for _, one in work],
            tokens_per_rank,
            push.on_layer,
            push.finish,
            rows_per_rank=rows,
        )
        for event, at in push.finish():
            self._perform(self._state.step(event, at))
        step_seconds = self._clock.now() - began
        for (chunk, _), token in zip(work, tokens, strict=True):
            self._num_computed_tokens += chunk.end - chunk.begin
            if not self._is_running(chunk.attempt_id):
                continue  # its peer is gone
            self._ledger.learn(chunk.attempt_id, chunk.end)
            self._apply(Advanced(chunk.attempt_id, chunk.end, step_seconds))
            if chunk.is_last:
                logprobs = self._first_tokens.prompt_logprobs(chunk.attempt_id)
                self._apply(Sampled(chunk.attempt_id, token, logprobs))
        self._num_steps += 1
        self._steps.append((step_seconds, len(work), max(tokens_per_rank)))
        self._news = True

    def _page_range(self, chunk: Chunk) -> PageRange:
        first = chunk.begin // self._geometry.page_tokens
        return PageRange(chunk.attempt_id, first, self._ledger.num_pages(chunk.end))

    def _sequence_chunk(self, chunk: Chunk) -> SequenceChunk:
        token_ids = unpack_ids(self._state[chunk.attempt_id].submit.token_ids)
        return SequenceChunk(
            token_ids=token_ids[chunk.begin : chunk.end],
            following=0 if chunk.is_last else token_ids[chunk.end],
            start=chunk.begin,
            pages=self._ledger.pages(chunk.attempt_id),
            sample=self._first_tokens.row(chunk),
            scores=self._first_tokens.scores(chunk.attempt_id),
        )

    def _is_running(self, attempt_id: str) -> bool:
        return attempt_id in self._state and self._state[attempt_id].phase is AttemptPhase.RUNNING

    def _apply(self, *events: Event) -> None:
        for event in events:
            self._perform(self._state.step(event, self._clock.now()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._tell(message)
                case Release(attempt_id):
                    self._ledger.close(attempt_id)
                    self._pusher.close(attempt_id)
                    self._targets.pop(attempt_id, None)
                    self._first_tokens.close(attempt_id)
                    self._news = True
                case Withdraw(attempt_id):
                    self._apply(*self._pusher.withdraw(attempt_id))
                case ReleasePeer(attempt_id):
                    log.warning("a peer takes no KV, given up", attempt_id=attempt_id)
                    self._pusher.release_peer(attempt_id)
                case Die(message):
                    raise RuntimeError(message)

    def _tell(self, message: RankMessage) -> None:
        if isinstance(message, Failed):
            log.warning(
                "prefill failed",
                request_id=message.request_id,
                attempt_id=message.attempt_id,
                code=message.code,
                reason=message.message,
            )
        self._outbox.append(message)
        self._news = True

    def _take_statistics(self) -> RankStats:
        running = [attempt for attempt in self._state if attempt.phase is AttemptPhase.RUNNING]
        waiting = [attempt for attempt in self._state if attempt.phase is AttemptPhase.WAITING]
        num_transferring = len(self._state) - len(running) - len(waiting)
        stats = msgspec.structs.replace(
            self._ledger.page_stats(),
            num_running=len(running),
            num_waiting=len(waiting),
            num_transferring=num_transferring,
            num_waiting_tokens=sum(a.num_left_tokens for a in (*running, *waiting)),
            num_steps=self._num_steps,
            step_seconds=tuple(seconds for seconds, _, _ in self._steps),
            batch_sizes=tuple(size for _, size, _ in self._steps),
            step_tokens=tuple(num_tokens for _, _, num_tokens in self._steps),
            tokens_computed_total=self._num_computed_tokens,
            tokens_cached_total=self._num_cached_tokens,
            kv_bytes_total=self._pusher.bytes_total,
            kv_seconds=tuple(self._pusher.landed_seconds),
            kv_failures_total=self._pusher.num_failures,
        )
        self._steps.clear()
        self._pusher.landed_seconds.clear()
        self._news = False
        return stats


def _geometry(context: RankContext) -> KvGeometry:
    num_layers, _, page_tokens, kv_dim = context.kv_cache.shape
    return KvGeometry(
        num_layers=num_layers,
        page_tokens=page_tokens,
        page_bytes=page_tokens * kv_dim * context.kv_cache.element_size(),
        kv_fingerprint=context.kv_fingerprint,
    )
