"""Continuous batching on one decode rank: performs what `state` and `plan` decide.

    turn:  hear the front and the transfer, plan, preempt, grow, admit
    step:  turn -> exchange facts with the EP group -> launch: forward and sample
           -> land: take the tokens in, tell the front

Every rank of the group takes part in every step, with an empty batch if it has nothing to do.
When nobody has anything to do, ranks wait, each on its own link, until one wakes the others.

With an overlapped schedule a step lands behind the launch of the next one: while the device
computes, the host hears, plans and tells. Requests whose last token is in flight step all the same;
sampling that depends on it (penalties, grammars) begins when it has landed. Before a request is put
back, everything lands. Experts change places when no step is being computed.
"""

import time
from collections.abc import Sequence

import msgspec

from core.clock import Clock, SystemClock
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
from engine.experts.rank_experts import RankExperts
from engine.grammar.grammars import GRAMMAR_POLL_SECONDS, Grammars
from engine.link.kv_notice import decode_notices
from engine.link.messages import (
    ExpertOrder,
    LoopMessage,
    RankMessage,
    Shutdown,
    Submit,
    SubmitPrefill,
)
from engine.start.rank import RankContext

log = get_logger("decode_worker.loop")

# Idle, the front is told of this rank's state this often.
IDLE_SECONDS = 1.0
# KV lands without waking anybody, and lands only while somebody looks: often, when nothing else
# keeps a request from starting, and now and then while its prefill is still computing. A peer
# that is to stop writing cannot finish either before we have looked.
KV_POLL_SECONDS = 0.0002
PREFILL_POLL_SECONDS = 0.002
# While a step is computed: the front is heard at once, KV and the end of the step so often.
LISTEN_MILLISECONDS = 1
QUIET_SECONDS = 0.003


class DecodeLoop:
    """One rank's loop; `run` returns when the whole EP group leaves."""

    def __init__(self, context: RankContext, clock: Clock | None = None) -> None:
        self._link = context.link
        self._group = context.group
        self._transfer = context.transfer
        self._runner = context.runner
        self._clock = clock or SystemClock()
        self._pool = context.pool
        self._state = RankState(_facts(context), context.pool)
        self._grammars = Grammars(
            context.settings.model,
            context.config.vocab_size,
            context.config.eos_token_ids,
            self._clock,
        )
        self._experts = RankExperts(context, self._clock)
        self._outbox: list[RankMessage] = []
        asked = context.settings.overlap_schedule
        self._overlaps = self._runner.runs_ahead if asked is None else asked
        self._inflight: InflightStep | None = None
        self._steps = StepLog()
        self._reported_at = self._clock.now()
        self._reported_free = self._pool.num_free
        self._stop = False
        self._stop_told = False  # to the other ranks, in an exchange

    def run(self) -> None:
        """Steps until all fronts of the group have said Shutdown: the other nodes' requests need
        this rank's experts as long as there are any."""
        log.info("schedule", overlapped=self._overlaps)
        while self._step():
            pass
        self._land()
        self._report()
        self._runner.close()
        self._grammars.close()

    def _step(self) -> bool:
        """One step of the whole group; False when it leaves."""
        batch = self._turn()
        if self._outbox:
            self._report()  # Reserved and ends do not wait for the forward pass
        began = self._clock.now()
        if self._group.steps_use_sockets:
            self._await_flight()
        facts = self._group.exchange((len(batch), int(self._stop), *self._experts.facts()))
        self._stop_told = self._stop
        if all(stop for _, stop, *_ in facts):
            return False
        self._change_experts([told[2:] for told in facts])
        tokens_per_rank = tuple(told[0] for told in facts)
        if any(tokens_per_rank):
            inflight = self._launch(batch, tokens_per_rank, began)
            self._land()
            inflight.step.sample()  # histories know all tokens in front of it
            self._inflight = inflight
            if not self._overlaps:
                self._land()
        elif self._inflight is not None:
            self._land()  # what comes of it is planned before anybody sleeps
        else:
            self._idle()
            return True
        self._report_news()
        return True

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
        messages = self._link.drain()
        events = [*self._arrived(), *self._heard(messages), *self._compiled()]
        self._apply(*events, Tick())
        for event in events:
            if isinstance(event, Submit):
                self._begin_grammar(event.request_id)
        return bool(events)

    def _begin_grammar(self, request_id: str) -> None:
        request = self._state.requests.get(request_id)
        if request is not None and not request.is_ready:
            self._grammars.begin(request_id, request.sampling)

    def _plan(self) -> Plan:
        decided = plan(self._state.snapshot())
        if decided.preempt and self._inflight is not None:
            # What is in flight may end somebody, and bring the pages that are wanted.
            self._land()
            decided = plan(self._state.snapshot())
        return decided

    def _launch(
        self, batch: list[Request], tokens_per_rank: tuple[int, ...], began: float
    ) -> InflightStep:
        eos_token_ids = self._state.facts.eos_token_ids
        pieces = [next_chunk(request, self._inflight, eos_token_ids) for request in batch]
        step = self._runner.begin(pieces, tokens_per_rank)
        names = tuple(request.request_id for request in batch)
        self._apply(Launched(names))
        rows = {name: row for row, name in enumerate(names)}
        return InflightStep(step=step, rows=rows, began=began)

    def _land(self) -> None:
        """Takes in the tokens of the step under way, if there is one."""
        inflight = self._inflight
        if inflight is None:
            return
        self._listen(inflight)
        self._inflight = None
        self._apply(Landed(inflight.tokens()))
        self._steps.landed(inflight, self._clock.now())

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

    def _await_flight(self) -> None:
        if self._inflight is not None:
            self._inflight.step.wait()

    def _change_experts(self, facts: Sequence[tuple[int, ...]]) -> None:
        if self._experts.has_work(facts):
            self._await_flight()  # it reads the weights and the maps that may change
            self._outbox.extend(self._experts.at_boundary(facts))

    def _idle(self) -> None:
        """Returns when this rank or a peer has work, or the group is to leave."""
        self._steps.rest()
        while True:
            self._report_news()
            self._wait()
            if self._group.peer_woke():
                return
            if self._has_work():
                self._group.wake()
                return

    def _has_work(self) -> bool:
        """Whether a step would do something here; the step itself plans again."""
        batch = self._turn()
        stop_is_news = self._stop and not self._stop_told
        return bool(batch) or stop_is_news or self._experts.has_news

    def _wait(self) -> None:
        if self._state.awaits_kv:
            # Shorter than what sockets can be polled for.
            time.sleep(KV_POLL_SECONDS)
            seconds = 0.0
        else:
            seconds = PREFILL_POLL_SECONDS if self._state.expects_writes else IDLE_SECONDS
            if self._grammars.num_waiting:
                seconds = min(seconds, GRAMMAR_POLL_SECONDS)
            seconds = min(seconds, self._experts.wait_seconds)
        self._group.idle_wait(self._link.socket, seconds)

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

    def _heard(self, messages: list[LoopMessage]) -> list[Event]:
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Shutdown):
                self._stop = True
            elif isinstance(message, ExpertOrder):
                self._experts.hear(message)
            else:
                assert not isinstance(message, SubmitPrefill), "not for a decode rank"
                events.append(message)
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

    def _report_news(self) -> None:
        if (
            self._outbox
            or self._pool.num_free != self._reported_free
            or self._clock.now() - self._reported_at >= IDLE_SECONDS
        ):
            self._report()

    def _report(self) -> None:
        """Sends what there is to say, and the statistics."""
        self._link.send(self._outbox, rank_stats(self._state, self._steps))
        self._outbox.clear()
        self._steps.recent.clear()
        self._state.kv_waits.clear()
        self._reported_at = self._clock.now()
        self._reported_free = self._pool.num_free


def _facts(context: RankContext) -> RankFacts:
    ready = context.ready
    return RankFacts(
        num_layers=context.config.num_layers,
        page_tokens=ready.page_tokens,
        max_model_len=ready.max_model_len,
        max_running=ready.max_running,
        eos_token_ids=ready.eos_token_ids,
        kv_arrival_seconds=context.settings.kv_arrival_seconds,
        agent=msgspec.msgpack.encode(context.transfer.describe()),
        kv_fingerprint=ready.kv_fingerprint,
        attempt_prefix=f"{context.start.epoch}-{context.start.rank}",
    )
