"""The Decode service: owns each request from acceptance to its last token.

Generate -> Submit to the rank with most room -> Reserved -> Prefill on the assigned worker
         -> Prefilled to the rank -> Produced ... -> end; every end clears both legs.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from core.address import parse_address
from core.clock import Clock, SystemClock
from core.errors import (
    Draining,
    EpserveError,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from core.log import get_logger
from decode_worker.call import Call, response_of
from decode_worker.call_spans import Stage
from decode_worker.generate_request import submit_of
from decode_worker.pick import RankRoom, pick_rank
from decode_worker.prefill_calls import PrefillCalls, draining_error, lost_error
from decode_worker.prefill_peer import PrefillPeer
from engine.link.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    Produced,
    Quarantined,
    RankMessage,
    Reserved,
)
from engine.process.front import WorkerFront
from engine.server.request_records import RequestRecords
from engine.server.worker_metrics import WorkerMetrics
from engine.server.worker_service import Load
from proto import generate_pb2, generate_pb2_grpc, router_pb2
from rpc.client import remaining_seconds

log = get_logger("decode_worker.service")

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(generate_pb2_grpc.DecodeServicer):
    """Implements `engine.server.worker_service.WorkerService` as well."""

    def __init__(
        self, front: WorkerFront, metrics: WorkerMetrics, clock: Clock | None = None
    ) -> None:
        self.num_accepted_total = 0
        self.records = RequestRecords()
        self._front = front
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._prefill_calls = PrefillCalls(
            front.settings.model_name,
            front.send,
            self._prefill_gone,
            self._prefill_draining,
            front.settings.quarantine_lease_seconds,
            self._clock,
        )
        self._calls: dict[str, Call] = {}
        self._num_streams = 0
        self._chosen_at: dict[int, int] = {}

    # ---- the call

    async def Generate(  # noqa: N802 - the name is the contract's
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        try:
            call = self._accept(request, remaining_seconds(context))
        except EpserveError as error:
            self._metrics.requests.labels(error.status.grpc.lower()).inc()
            raise
        outcome, finish = "cancelled", Finish.NONE
        try:
            while finish is Finish.NONE:
                response, failure = response_of(call, await call.take())
                if response.tokens:
                    self._count(call, len(response.tokens))
                if response.tokens or response.finish_reason:
                    yield response
                if failure is not None:
                    raise failure
                finish = Finish(response.finish_reason)
            outcome = "ok"
        except EpserveError as error:
            outcome = error.status.grpc.lower()
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            if outcome == "cancelled" and remaining_seconds(context) == 0:
                outcome = "deadline_exceeded"
            self._leave(call, outcome, finish)

    def _accept(self, request: generate_pb2.GenerateRequest, seconds: float | None) -> Call:
        self._check_meant(request)
        ready = min(self._front.ready, key=lambda rank: rank.pages_total)
        key = f"{request.request_id}#{self.num_accepted_total}"
        looks_up = self._front.settings.drafts_by_lookup
        submit = submit_of(request, key, ready, sees_prompt=looks_up)
        rank = pick_rank(self._rooms(), submit.num_tokens)
        if rank is None:
            raise Overloaded("every rank's queue is full")
        now = self._clock.now()
        call = Call(
            key=key,
            request=request,
            rank=rank,
            deadline=None if seconds is None else now + seconds,
            accepted_at=now,
        )
        self.records.begin(call.record)
        self.num_accepted_total += 1
        self._chosen_at[rank] = self.num_accepted_total
        self._calls[key] = call
        self._num_streams += 1
        self._front.send(rank, submit)
        self._front.on_change()
        return call

    def _check_meant(self, request: generate_pb2.GenerateRequest) -> None:
        """Refuses what this worker cannot or must not take."""
        front = self._front
        if not front.is_well:
            raise Unavailable("worker is not ready", failed_epoch=front.epoch)
        if request.decode_epoch and request.decode_epoch != front.epoch:
            raise Mismatch(
                f"this is worker {front.epoch}, not {request.decode_epoch}",
                failed_epoch=request.decode_epoch,
            )
        if front.draining:
            raise Draining("worker is draining", failed_epoch=front.epoch)
        if request.model != front.settings.model_name:
            raise ModelNotFound(f"model {request.model!r} is not served here")
        if not request.request_id:
            raise InvalidRequest("request_id is empty", param="request_id")
        try:
            parse_address(request.prefill.address)
        except ValueError as error:
            raise InvalidRequest(f"no prefill worker: {error}", param="prefill") from error
        if self._prefill_calls.is_gone(request.prefill.address, request.prefill.epoch):
            raise lost_error(request.prefill)

    def _rooms(self) -> list[RankRoom]:
        num_open = [0] * len(self._front.ready)
        num_tokens = [0] * len(self._front.ready)
        for call in self._calls.values():
            num_open[call.rank] += 1
            num_tokens[call.rank] += call.num_tokens
        settings = self._front.settings
        return [
            RankRoom(
                rank=rank,
                num_open=num_open[rank],
                num_tokens=num_tokens[rank],
                kv_tokens=(ready.pages_total - stats.pages_quarantined) * ready.page_tokens,
                max_open=ready.max_running + settings.max_waiting,
                max_running=ready.max_running,
                chosen_at=self._chosen_at.get(rank, 0),
            )
            for rank, (ready, stats) in enumerate(
                zip(self._front.ready, self._front.stats, strict=True)
            )
        ]

    def _count(self, call: Call, num_tokens: int) -> None:
        """Books tokens that are about to be sent."""
        now = self._clock.now()
        num_gaps = num_tokens
        if call.last_sent_at is None:
            call.record.first_token_seconds = now - call.accepted_at
            self._metrics.time_to_first_token.observe(call.record.first_token_seconds)
            call.last_sent_at = now
            num_gaps -= 1
        for _ in range(num_gaps):
            self._metrics.inter_token_latency.observe((now - call.last_sent_at) / num_gaps)
        call.last_sent_at = now
        call.num_sent_tokens += num_tokens
        call.record.num_output_tokens = call.num_sent_tokens

    def _leave(self, call: Call, outcome: str, finish: Finish) -> None:
        """No one listens any more: whatever is still under way for the call is stopped."""
        call.left = True
        if call.key in self._calls:
            self._prefill_calls.end(call)
            self._front.send(call.rank, Abort(request_id=call.key))
        self._num_streams -= 1
        self._front.on_change()
        seconds = self._clock.now() - call.accepted_at
        self._metrics.requests.labels(outcome).inc()
        self._metrics.request_latency.observe(seconds)
        how = finish.name.lower() if outcome == "ok" else outcome.upper()
        self.records.end(call.record, how, seconds)
        call.spans.end(call.record)
        log.info(
            "request over",
            request_id=call.traced_id,
            id=call.request_id,
            outcome=outcome,
            rank=call.rank,
            num_prompt_tokens=call.num_prompt_tokens,
            num_tokens=call.num_sent_tokens,
            seconds=round(seconds, 4),
        )

    # ---- what ranks say

    def on_message(self, rank: int, message: RankMessage) -> None:
        """Messages of calls that are not known any more are late and mean nothing."""
        if isinstance(message, Quarantined):
            self._prefill_calls.quarantined(rank, message.attempt_id)
            return
        assert isinstance(message, Reserved | Produced | Failed | Ended), message
        call = self._calls.get(message.request_id)
        if call is None:
            return
        match message:
            case Reserved():
                self._reserved(call, message)
            case Produced():
                self._produced(call, message)
            case Failed():
                call.put(_failure(call, message))
                self._forget(call)
            case Ended():
                self._forget(call)

    def _reserved(self, call: Call, reserved: Reserved) -> None:
        if call.left:
            return  # its Abort is on the way to the rank
        call.record.num_attempts += 1
        call.spans.enter(Stage.PREFILL)
        if call.reserved_at is None:
            call.reserved_at = self._clock.now()
            call.record.queue_seconds = call.reserved_at - call.accepted_at
            self._metrics.queue_time.observe(call.record.queue_seconds)
        self._prefill_calls.begin(call, reserved)

    def _produced(self, call: Call, produced: Produced) -> None:
        if self._prefill_calls.over(call):
            call.spans.enter(Stage.DECODE)
        call.record.note_produced(produced)
        call.put(produced)
        if produced.finish is not Finish.NONE:
            self._forget(call)

    def _prefill_gone(self, peer: PrefillPeer) -> None:
        """Requests that still wait for pages would only find out much later."""
        for call in self._calls.values():
            if call.prefill.address == peer.address:
                peer.gone_epochs.add(call.prefill.epoch)
                error = lost_error(call.prefill)
                failed = Failed(request_id=call.key, code=error.status.grpc, message=error.message)
                self._front.send(call.rank, failed)

    def _prefill_draining(self, prefill: router_pb2.WorkerRef) -> None:
        """Requests that it has yet to be asked for need not wait for their turn to hear it."""
        for call in self._calls.values():
            if call.prefill == prefill and not call.attempt_id:
                call.prefill_error = error = draining_error(prefill)
                failed = Failed(request_id=call.key, code=error.status.grpc, message=error.message)
                self._front.send(call.rank, failed)

    def _forget(self, call: Call) -> None:
        """The rank has said its last word on this call."""
        self._prefill_calls.over(call)
        del self._calls[call.key]
        self._front.on_change()

    # ---- WorkerService

    def load(self, rank: int) -> Load:
        """See `engine.server.worker_service.WorkerService`, as for the rest."""
        num_open = sum(call.rank == rank for call in self._calls.values())
        return Load(num_open=num_open, num_waiting_tokens=0)

    @property
    def num_open(self) -> int:
        return self._num_streams

    @property
    def is_quiet(self) -> bool:
        return not (self._num_streams or self._calls or self._prefill_calls.num_open)

    def hand_over(self, error: EpserveError) -> None:
        # Whose stream has ended leaves its rank, and what is still written its quarantine.
        self.fail_all(error)

    def fail_all(self, error: EpserveError) -> None:
        for call in self._calls.values():
            call.put(error)

    async def close(self) -> None:
        await self._prefill_calls.close()


def _failure(call: Call, failed: Failed) -> EpserveError:
    """The prefill worker's own error if the rank repeats it, else the rank's: one that dies when
    its KV has arrived ends nothing, whatever ends the request later."""
    error = call.prefill_error
    if error is not None and (failed.code, failed.message) == (error.status.grpc, error.message):
        return error
    return EpserveError.from_status(failed.code, failed.message, failed_epoch=call.prefill.epoch)
