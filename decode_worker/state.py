"""The books of one decode rank: a pure state machine over its requests and pages.

No I/O, no torch, no clock: `step(event, now)` takes one event and returns what to tell the
front. Phases are in `decode_worker.request`. Every event is legal in every phase; those that
come late, twice or for an unknown request change nothing.

    event            from      WAITING         PREFILLING                  RUNNING
    -----            ----      -------         ----------                  -------
    Submit           front     (new request -> WAITING)
    Admit            planner   -> PREFILLING   .                           .
    Prefilled        front     .               joins, once KV is complete  .
    KvNotice         transfer  .               joins, once Prefilled is in .
    GrammarReady     compiler  noted (+)       joins, once both are in (+) .
    Failed           front     over (*)        over                        .
    Tick             clock     .               over, if KV is overdue;     over, if its grammar is
                                               joins, if its mask is in    at its end, or a fault
    Grow             planner   .               .                           one page more
    Preempt          planner   .               .                           -> WAITING
    Launched         loop      .               .                           a token is in flight
    Landed           model     .               .                           next tokens; may be over
    Abort            front     over            over                        over
    PrefillStopped   front     (releases a quarantine; touches no request)

    (*) when it names no attempt: the prefill worker is gone before the attempt began
    (+) over, if there is no such grammar, or the output has come to its end

A step may be launched before the one before it has landed. Its tokens for requests that are
not in it any more (over, or preempted) are thrown away, see `decode_worker.inflight_steps`.
"""

from collections.abc import Sequence

from core.token_ids import unpack_ids
from decode_worker.arrival import Arrival
from decode_worker.events import (
    Admit,
    Event,
    GrammarReady,
    Grow,
    Landed,
    Launched,
    Outcome,
    Preempt,
    RankFacts,
    Tick,
    Totals,
)
from decode_worker.inflight_steps import InflightSteps
from decode_worker.plan import Snapshot, pages_for
from decode_worker.prompt_lookup import PromptLookup
from decode_worker.request import Attempt, Request, RequestPhase
from decode_worker.snapshot import snapshot_of
from engine.kv.pages import PagePool, pages_of
from engine.link.kv_notice import KvNotice
from engine.link.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    KvTarget,
    Prefilled,
    PrefillStopped,
    Produced,
    Quarantined,
    RankMessage,
    Reserved,
    Submit,
)
from engine.sampling.history import Match, history_of
from engine.sampling.sampling_params import sampling_of


class RankState:
    """`pool` is this object's alone."""

    def __init__(self, facts: RankFacts, pool: PagePool) -> None:
        self.facts = facts
        self.pool = pool
        self.totals = Totals()
        # How long KV came after the first token, of requests that have joined; the loop clears it.
        self.kv_waits: list[float] = []
        self.requests: dict[str, Request] = {}
        self._by_attempt: dict[str, Request] = {}  # attempts in PREFILLING and RUNNING
        self._inflight_steps = InflightSteps(pool)
        self._num_submitted = 0
        self._num_attempts = 0

    # ---- views

    def of_phase(self, phase: RequestPhase) -> list[Request]:
        """Requests in `phase`, higher priorities first, equal ones oldest first."""
        return sorted(
            (request for request in self.requests.values() if request.phase is phase),
            key=lambda request: (-request.priority, request.age),
        )

    @property
    def awaits_kv(self) -> bool:
        """Some request has its first token and lacks only KV, which arrives without a sound."""
        return any(
            request.attempt is not None
            and request.phase is RequestPhase.PREFILLING
            and request.attempt.prefilled is not None
            and not request.attempt.arrival.complete
            for request in self.requests.values()
        )

    def foreseen(self, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Those of the oldest step under way, which lands next, with drafts that are looked up."""
        return tuple(
            outcome if request is None else request.foresee(outcome, self.facts)
            for request, outcome in zip(self._landing, outcomes, strict=True)
        )

    def offer(self, outcomes: Sequence[Outcome]) -> list[Match]:
        """Tells matches of these tokens and drafts; returns those that look at them now."""
        rows = zip(self._landing, outcomes, strict=True)
        return [match for request, row in rows if request for match in request.offer(row)]

    @property
    def _landing(self) -> list[Request | None]:
        return [self._by_attempt.get(name) for name in self._inflight_steps.next_to_land]

    @property
    def num_prefilling(self) -> int:
        return sum(request.phase is RequestPhase.PREFILLING for request in self.requests.values())

    @property
    def expects_writes(self) -> bool:
        """A peer may be writing into our pages, for a live request or an abandoned one."""
        return self.num_prefilling > 0 or self.pool.counts().quarantined > 0

    def snapshot(self) -> Snapshot:
        """What the planner needs to know."""
        return snapshot_of(
            self.of_phase(RequestPhase.RUNNING),
            self.of_phase(RequestPhase.WAITING),
            self.num_prefilling,
            self.pool,
            self.facts,
        )

    # ---- events

    def step(self, event: Event, now: float) -> list[RankMessage]:
        """Takes one event at `now`, in seconds; returns messages for the front, in order."""
        match event:
            case Submit():
                return self._submit(event)
            case Prefilled():
                return self._prefilled(event, now)
            case KvNotice():
                return self._notice(event, now)
            case Failed():
                return self._failed(event)
            case Abort():
                return self._abort(event.request_id)
            case PrefillStopped():
                self.pool.release(event.attempt_id)
                return []
            case Admit():
                return self._admit(event.request_id)
            case Grow():
                return self._grow(event.request_id)
            case Preempt():
                return self._preempt(event.request_id)
            case Launched():
                return self._launched(event)
            case Landed():
                return self._landed(event)
            case GrammarReady():
                return self._grammar_ready(event)
            case Tick():
                return self._tick(now)

    def _submit(self, event: Submit) -> list[RankMessage]:
        most = self.pool.counts().total * self.facts.page_tokens
        assert 0 < event.num_tokens <= most, "the front lets only requests in that can fit"
        if event.request_id in self.requests:
            return []
        self._num_submitted += 1
        sampling, output = sampling_of(event.sampling), unpack_ids(event.output_token_ids)
        prompt = unpack_ids(event.prompt_token_ids)
        self.requests[event.request_id] = Request(
            request_id=event.request_id,
            age=self._num_submitted,
            num_tokens=event.num_tokens,
            num_prompt_tokens=event.num_prompt_tokens,
            sampling=sampling,
            earlier_output=output,
            last_token_id=event.last_token_id,
            draft_share=self.totals.draft_share,
            priority=event.priority,
            lookup=PromptLookup([*prompt, *output]) if self.facts.looks_up else None,
            history=history_of(sampling, prompt, output),
            is_ready=sampling.grammar is None,
        )
        return []

    def _grammar_ready(self, event: GrammarReady) -> list[RankMessage]:
        request = self.requests.get(event.request_id)
        if request is None or request.is_ready:
            return []
        assert request.history is not None
        if event.match is None:
            error = event.error
            assert error is not None
            return self._give_up(request, error.status.grpc, error.message)
        request.history.attach(event.match)
        request.is_ready = True
        if request.history.is_complete:
            return self._finish(request, Finish.STOP)
        return self._join_if_complete(request) if request.phase is RequestPhase.PREFILLING else []

    def _admit(self, request_id: str) -> list[RankMessage]:
        request = self._in_phase(request_id, RequestPhase.WAITING)
        if request is None:
            return []
        self._num_attempts += 1
        attempt_id = f"{self.facts.attempt_prefix}-{self._num_attempts}"
        num_pages = pages_for(request.num_tokens, self.facts.page_tokens)
        runs = self.pool.allocate(attempt_id, num_pages)
        request.pages = pages_of(runs)
        request.phase = RequestPhase.PREFILLING
        request.attempt = Attempt(
            attempt_id=attempt_id, arrival=Arrival(self.facts.num_layers, num_pages)
        )
        self._by_attempt[attempt_id] = request
        target = KvTarget(
            agent=self.facts.agent, runs=tuple(runs), kv_fingerprint=self.facts.kv_fingerprint
        )
        return [Reserved(request_id=request_id, attempt_id=attempt_id, target=target)]

    def _prefilled(self, event: Prefilled, now: float) -> list[RankMessage]:
        request = self._prefilling(event.attempt_id)
        if request is None or request.request_id != event.request_id:
            return []
        assert request.attempt is not None
        if request.attempt.prefilled is None:
            request.attempt.prefilled = event
            request.attempt.prefilled_at = now
        return self._join_if_complete(request)

    def _notice(self, event: KvNotice, now: float) -> list[RankMessage]:
        request = self._prefilling(event.attempt_id)
        if request is None:
            return []
        assert request.attempt is not None
        try:
            request.attempt.arrival.add(event)
        except ValueError as error:
            self.totals.kv_failures += 1
            return self._give_up(request, "UNAVAILABLE", f"prefill announced wrong pages: {error}")
        request.attempt.kv_arrived_at = now
        return self._join_if_complete(request)

    def _join_if_complete(self, request: Request) -> list[RankMessage]:
        """Both proofs are needed: the first token says that prefill was right, the notices
        that every page is here. And so is the grammar, where there is one."""
        attempt = request.attempt
        assert attempt is not None
        if attempt.prefilled is None or not attempt.arrival.complete or not request.is_ready:
            return []
        if request.awaits_mask:  # from before it was put back
            return []
        request.phase, request.is_fresh, request.drafts = RequestPhase.RUNNING, True, ()
        self.totals.tokens_transferred += request.num_tokens
        self.totals.kv_bytes += attempt.prefilled.kv_bytes
        self.kv_waits.append(max(0.0, attempt.kv_arrived_at - attempt.prefilled_at))
        if attempt.prefilled.token is None:
            return self._finish(request, Finish.LENGTH)
        outcome = Outcome((attempt.prefilled.token,))
        return self._append(request, request.foresee(outcome, self.facts))

    def _launched(self, event: Launched) -> list[RankMessage]:
        running = [self._in_phase(name, RequestPhase.RUNNING) for name in event.request_ids]
        self._inflight_steps.launch(
            [None if request is None else request.attempt for request in running]
        )
        return []

    def _landed(self, event: Landed) -> list[RankMessage]:
        messages: list[RankMessage] = []
        for attempt_id, outcome in zip(self._inflight_steps.land(), event.outcomes, strict=True):
            request = self._by_attempt.get(attempt_id)
            if request is not None and outcome.tokens:
                request.is_fresh = False
                messages += self._append(request, outcome)
        return messages

    def _append(self, request: Request, outcome: Outcome) -> list[RankMessage]:
        tokens, finish = request.take(outcome, self.facts)
        name, end, num_proposed = request.request_id, finish or Finish.NONE, outcome.num_proposed
        self.totals.tokens_generated += len(tokens)
        self.totals.count_drafts(num_proposed, len(tokens) - 1)
        produced = Produced(request_id=name, tokens=tokens, finish=end, num_proposed=num_proposed)
        if finish is None:
            text = f"no token that follows {request.num_tokens} tokens fits the grammar"
            failed = self._give_up(request, "INVALID_ARGUMENT", text)
            return [produced, *failed] if tokens else failed
        if finish is not Finish.NONE:
            self._forget(request)
        return [produced]

    def _grow(self, request_id: str) -> list[RankMessage]:
        request = self._in_phase(request_id, RequestPhase.RUNNING)
        if request is not None:
            assert request.attempt is not None
            request.pages.append(self.pool.grow(request.attempt.attempt_id))
        return []

    def _preempt(self, request_id: str) -> list[RankMessage]:
        request = self._in_phase(request_id, RequestPhase.RUNNING)
        if request is not None:
            self._free_pages(request)
            request.phase = RequestPhase.WAITING
            self.totals.preemptions += 1
        return []

    # ---- ends

    def _finish(self, request: Request, finish: Finish) -> list[RankMessage]:
        """Without another token."""
        produced = Produced(request_id=request.request_id, tokens=(), finish=finish)
        return [*self._forget(request), produced]

    def _failed(self, event: Failed) -> list[RankMessage]:
        if event.attempt_id:
            request = self._prefilling(event.attempt_id)
        else:
            request = self._in_phase(event.request_id, RequestPhase.WAITING)
        return [] if request is None else self._give_up(request, event.code, event.message)

    def _tick(self, now: float) -> list[RankMessage]:
        messages: list[RankMessage] = []
        for request in list(self._by_attempt.values()):
            attempt = request.attempt
            assert attempt is not None
            if request.phase is RequestPhase.RUNNING:
                messages += self._look_at_match(request)
                continue
            if attempt.prefilled is None:
                continue
            if attempt.arrival.complete:
                messages += self._join_if_complete(request)
                continue
            seconds = self.facts.kv_arrival_seconds
            if now - max(attempt.prefilled_at, attempt.kv_arrived_at) > seconds:
                text = f"KV of the prompt has not arrived: none for {seconds:g} s after prefill"
                self.totals.kv_failures += 1
                messages += self._give_up(request, "UNAVAILABLE", text)
        return messages

    def _look_at_match(self, request: Request) -> list[RankMessage]:
        """What a slow match has to tell after its token was."""
        match = request.match
        if match is None:
            return []
        if (fault := match.fault()) is not None:
            return self._give_up(request, "INVALID_ARGUMENT", fault)
        return self._finish(request, Finish.STOP) if match.is_complete else []

    def _give_up(self, request: Request, code: str, text: str) -> list[RankMessage]:
        failed = request.failed(code, text)
        return [*self._forget(request), failed]

    def _abort(self, request_id: str) -> list[RankMessage]:
        """Ended is the answer for unknown requests, too: there is nothing more to come."""
        request = self.requests.get(request_id)
        messages = [] if request is None else self._forget(request)
        return [*messages, Ended(request_id=request_id)]

    def _forget(self, request: Request) -> list[RankMessage]:
        """Ends a request: pages that may still be written to go into quarantine."""
        del self.requests[request.request_id]
        attempt = request.attempt
        written = request.phase is RequestPhase.PREFILLING and attempt is not None
        if attempt is None or not written or attempt.arrival.complete:
            self._free_pages(request)
            return []
        del self._by_attempt[attempt.attempt_id]
        self.pool.quarantine(attempt.attempt_id, attempt.attempt_id)
        return [Quarantined(request_id=request.request_id, attempt_id=attempt.attempt_id)]

    def _free_pages(self, request: Request) -> None:
        if request.attempt is not None:
            self._inflight_steps.give_up(request.attempt)
            del self._by_attempt[request.attempt.attempt_id]
        request.attempt = None
        request.pages = []

    def _in_phase(self, request_id: str, phase: RequestPhase) -> Request | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.phase is phase else None

    def _prefilling(self, attempt_id: str) -> Request | None:
        request = self._by_attempt.get(attempt_id)
        return request if request is not None and request.phase is RequestPhase.PREFILLING else None
