"""Continuous batching on one decode rank: performs what `state` and `plan` decide.

A turn hears the front and the transfer, plans, preempts, grows and admits; a pass is launched
(forward and sample) and lands (its tokens are taken in and told).

With an overlapped schedule a pass lands after the launch of the next one: while the device
computes, the host hears, plans and tells. Requests whose last token is in flight step all the same;
sampling that depends on it (penalties, grammars) begins when it has landed. A request whose mask
is late sits steps out; what one has sampled for it without the mask is thrown away. Before a
request is put back, everything lands. Experts change places when no step is being computed.
"""

import msgspec

from core.clock import Clock
from core.errors import EpserveError
from core.log import get_logger
from decode_worker.events import (
    Admit,
    Event,
    GrammarReady,
    Grow,
    Landed,
    Launched,
    Preempt,
    RankFacts,
    Tick,
)
from decode_worker.inflight_step import InflightStep, next_chunk
from decode_worker.plan import Plan, plan
from decode_worker.rank_stats import StepLog, rank_stats
from decode_worker.request import Request
from decode_worker.state import RankState
from engine.grammar.grammars import GRAMMAR_POLL_SECONDS, Grammars
from engine.grammar.paced_match import settle
from engine.link.kv_notice import decode_notices
from engine.link.messages import RankStats, Submit, SubmitPrefill
from engine.process.draft_count import drafts_that_pay, own_drafts
from engine.rank_loop import IDLE_SECONDS, RankLoop, RequestMessage
from engine.start.rank import RankContext

log = get_logger("decode_worker.loop")

# KV lands without waking the loop, and lands only while it looks: often, when nothing else
# keeps a request from starting, and now and then while its prefill is still computing. A peer
# that is to stop writing cannot finish either before we have looked.
KV_POLL_SECONDS = 0.0002
PREFILL_POLL_SECONDS = 0.002
# While a step is computed: the front is heard at once, KV and the end of the step so often.
LISTEN_MILLISECONDS = 1
QUIET_SECONDS = 0.003


class DecodeLoop(RankLoop[list[Request]]):
    """One rank's loop."""

    def __init__(self, context: RankContext, clock: Clock | None = None) -> None:
        super().__init__(context, clock)
        self._transfer = context.transfer
        self._pool = context.pool
        self._state = RankState(_facts(context), context.pool)
        self._grammars = Grammars(
            context.settings.model,
            context.config.vocab_size,
            context.config.eos_token_ids,
            self._clock,
        )
        asked = context.settings.overlap_schedule
        self._overlaps = self._runner.runs_ahead if asked is None else asked
        self._inflight: InflightStep | None = None
        self._steps = StepLog()
        self._reported_free = self._pool.num_free
        log.info("schedule", overlapped=self._overlaps)

    def _close(self) -> None:
        self._runner.close()
        self._grammars.close()

    def _turn(self) -> list[Request]:
        """Brings the books up to date; the requests that step next."""
        self._hear()
        decided = self._plan()
        self._apply(
            *(Preempt(request_id) for request_id in decided.preempt),
            *(Grow(request_id) for request_id in decided.grow),
            *(Admit(request_id) for request_id in decided.admit),
        )
        return [self._state.requests[request_id] for request_id in decided.step]

    def _hear(self) -> bool:
        """Takes in what has come; whether anything has."""
        messages = self._drain()  # before KV is looked at, see `_arrived`
        events: list[Event] = [*self._arrived(), *map(_event, messages), *self._compiled()]
        self._apply(*events, Tick())
        for event in events:
            if isinstance(event, Submit):
                self._begin_grammar(event.request_id)
        return bool(events)

    def _begin_grammar(self, request_id: str) -> None:
        request = self._state.requests.get(request_id)
        if request is not None and not request.is_ready:
            self._grammars.begin(request_id, request.sampling, request.earlier_output)

    def _plan(self) -> Plan:
        decided = plan(self._state.snapshot())
        if decided.preempt and self._inflight is not None:
            # What is in flight may end a request, and bring the pages that are wanted.
            self._land()
            decided = plan(self._state.snapshot())
        return decided

    def _sizes(self, work: list[Request]) -> tuple[int, int]:
        facts = self._state.facts
        shares, most = [request.draft_share for request in work], facts.speculative_tokens
        if facts.looks_up:  # what there is to verify is known by now
            shares = [request.draft_share * bool(request.drafts) for request in work]
            most = max((len(request.drafts) for request in work), default=0)
        return len(work), drafts_that_pay(shares, most, self._steps.num_steps)

    def _compute(
        self,
        work: list[Request],
        began: float,
        tokens_per_rank: tuple[int, ...],
        drafts_per_rank: tuple[int, ...],
    ) -> None:
        # All ranks compute as many rows as the one with most requests, for which they must pay.
        _, num_drafts = max(zip(tokens_per_rank, drafts_per_rank, strict=True))
        inflight = self._launch(work, began, tokens_per_rank, num_drafts)
        self._land()
        inflight.late = self._awaiting_masks()
        inflight.step.sample()  # histories know all tokens before it, but for those that are late
        self._inflight = inflight
        if not self._overlaps:
            self._land()

    def _launch(
        self, batch: list[Request], began: float, tokens_per_rank: tuple[int, ...], num_drafts: int
    ) -> InflightStep:
        facts, before = self._state.facts, self._inflight
        chunks = [
            next_chunk(
                request, before, facts, own_drafts(request.draft_share, len(batch), num_drafts)
            )
            for request in batch
        ]
        step = self._runner.begin(chunks, tokens_per_rank, num_drafts)
        names = tuple(request.request_id for request in batch)
        self._apply(Launched(names))
        rows = {name: row for row, name in enumerate(names)}
        return InflightStep(
            step=step, rows=rows, chunks=chunks, num_tokens=max(tokens_per_rank), began=began
        )

    def _land(self) -> bool:
        inflight = self._inflight
        if inflight is None:
            return False
        self._listen(inflight)
        self._inflight = None
        outcomes = self._state.foreseen(inflight.outcomes())
        settle(self._state.offer(outcomes))
        self._apply(Landed(outcomes))
        self._steps.landed(inflight, self._clock.now())
        return True

    def _listen(self, inflight: InflightStep) -> None:
        """Hears, lets in and tells while a step is being computed, until shortly before its end:
        from there on nothing is to come between its tokens and those who wait for them."""
        until = self._steps.expected_end(inflight) - QUIET_SECONDS
        while not inflight.step.is_over and self._clock.now() < until:
            self._link.socket.poll(LISTEN_MILLISECONDS)
            if self._hear():
                self._apply(*map(Admit, plan(self._state.snapshot()).admit))
            if self._outbox:
                self._report()

    def _awaiting_masks(self) -> frozenset[str]:
        """Requests whose next token cannot be sampled yet."""
        return frozenset(name for name, one in self._state.requests.items() if one.awaits_mask)

    def _await_inflight(self) -> None:
        if self._inflight is not None:
            self._inflight.step.wait()

    def _rest(self) -> None:
        self._steps.rest()

    def _wait_seconds(self) -> float:
        if self._state.awaits_kv:
            return KV_POLL_SECONDS
        seconds = PREFILL_POLL_SECONDS if self._state.expects_writes else IDLE_SECONDS
        waits = self._grammars.num_waiting or self._awaiting_masks()
        return min(seconds, GRAMMAR_POLL_SECONDS) if waits else seconds

    def _arrived(self) -> list[Event]:
        """What the transfer has to tell: pages that have landed.

        Asked after the link was drained, and applied before its messages: a peer that is said
        to have gone may have delivered everything before.
        """
        events: list[Event] = []
        for notification in self._transfer.notifications():
            try:
                events.extend(decode_notices(notification.message))
            except ValueError as error:
                log.warning("notice refused", sender=notification.sender, reason=str(error))
        return events

    def _compiled(self) -> list[Event]:
        """Grammars that are there by now, or cannot be had."""
        return [
            GrammarReady(request_id, None, result)
            if isinstance(result, EpserveError)
            else GrammarReady(request_id, result)
            for request_id, result in self._grammars.poll()
        ]

    def _apply(self, *events: Event) -> None:
        now = self._clock.now()
        for event in events:
            self._outbox.extend(self._state.step(event, now))

    def _has_news(self) -> bool:
        return self._pool.num_free != self._reported_free

    def _take_statistics(self) -> RankStats:
        stats = rank_stats(self._state, self._steps)
        self._steps.recent.clear()
        self._state.kv_waits.clear()
        self._reported_free = self._pool.num_free
        return stats


def _event(message: RequestMessage) -> Event:
    assert not isinstance(message, SubmitPrefill), "not for a decode rank"
    return message


def _facts(context: RankContext) -> RankFacts:
    ready = context.ready
    return RankFacts(
        num_layers=context.config.num_kv_layers,
        page_tokens=ready.page_tokens,
        max_model_len=ready.max_model_len,
        max_running=ready.max_running,
        eos_token_ids=ready.eos_token_ids,
        kv_arrival_seconds=context.settings.kv_arrival_seconds,
        agent=msgspec.msgpack.encode(context.transfer.describe()),
        kv_fingerprint=ready.kv_fingerprint,
        attempt_prefix=f"{context.start.epoch}-{context.start.rank}",
        speculative_tokens=context.settings.speculative_tokens,
        looks_up=context.settings.drafts_by_lookup,
    )
