"""The `Prefill` gRPC service on the worker's front. Torch-free; decides nothing but the rank.

A call that ends early, because its client went away, cancelled or ran out of time, aborts its
attempt: no one is left who could want the KV.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import grpc

from core.errors import (
    Cancelled,
    Draining,
    EpserveError,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Unavailable,
)
from core.log import get_logger
from engine.link.messages import Abort, Failed, Prefilled, RankMessage, Stopped, SubmitPrefill
from engine.process.front import WorkerFront
from engine.server.request_records import LegRecord, RequestRecords
from engine.server.wire import prompt_messages, token_message
from engine.server.worker_metrics import WorkerMetrics
from engine.server.worker_service import Load
from prefill_worker.prefill_request import submit_of
from prefill_worker.rank_choice import RankChoice
from prefill_worker.stage_spans import record_stages
from proto import generate_pb2, generate_pb2_grpc

log = get_logger("prefill_worker.service")

Context = grpc.aio.ServicerContext[Any, Any]

# Attempts whose Abort has overtaken their Prefill are remembered, so many at most.
MAX_REFUSED = 10_000


@dataclass(slots=True)
class _Open:
    """A Prefill call in progress; `stopped_by` is why its attempt was asked to stop."""

    rank: int
    num_tokens: int
    outcome: "asyncio.Future[Prefilled]"
    stopped_by: EpserveError | None = None


@dataclass(slots=True)
class _Stop:
    """Abort calls in progress for one attempt, and the ranks that have not confirmed yet."""

    ranks: set[int]
    confirmed: "asyncio.Future[bool]"
    was_known: bool = field(default=False)


class PrefillService(generate_pb2_grpc.PrefillServicer):
    """Implements `engine.server.worker_service.WorkerService`."""

    def __init__(self, front: WorkerFront, metrics: WorkerMetrics) -> None:
        settings = front.settings
        self.num_accepted_total = 0
        self.records = RequestRecords()
        self._front = front
        self._metrics = metrics
        self._choice = RankChoice(settings.ranks, settings.page_tokens)
        self._open: dict[str, _Open] = {}
        self._stops: dict[str, _Stop] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()
        # Attempts that their rank has yet to say the last word on; what is still pushed after
        # a good one, the rank's pages tell.
        self._unsettled: set[str] = set()

    # ---- gRPC

    async def Prefill(  # noqa: N802 - the name is the contract's
        self, request: generate_pb2.PrefillRequest, context: Context
    ) -> generate_pb2.PrefillResponse:
        began = time.monotonic()
        try:
            self._check_meant(request)
            submit = submit_of(request, self._front.ready[0])
            prefilled = await self._prefill(submit, request.prefix_hashes)
        except asyncio.CancelledError:
            self._metrics.requests.labels("cancelled").inc()
            raise
        except EpserveError as error:
            self._metrics.requests.labels(error.status.grpc.lower()).inc()
            raise
        seconds = time.monotonic() - began
        self._metrics.requests.labels("ok").inc()
        self._metrics.queue_time.observe(prefilled.queue_seconds)
        self._metrics.time_to_first_token.observe(seconds)
        self._metrics.request_latency.observe(seconds)
        log.info(
            "prefilled",
            attempt_id=prefilled.attempt_id,
            num_cached_tokens=prefilled.num_cached_tokens,
            num_computed_tokens=prefilled.num_computed_tokens,
            queue_ms=round(prefilled.queue_seconds * 1e3, 2),
            compute_ms=round(prefilled.compute_seconds * 1e3, 2),
            total_ms=round(seconds * 1e3, 2),
        )
        return generate_pb2.PrefillResponse(
            first_token=None if prefilled.token is None else token_message(prefilled.token),
            num_cached_tokens=prefilled.num_cached_tokens,
            num_computed_tokens=prefilled.num_computed_tokens,
            kv_bytes=prefilled.kv_bytes,
            queue_seconds=prefilled.queue_seconds,
            compute_seconds=prefilled.compute_seconds,
            transfer_seconds=prefilled.transfer_seconds,
            prompt_logprobs=prompt_messages(prefilled.prompt_logprobs),
        )

    async def Abort(  # noqa: N802 - as above
        self, request: generate_pb2.AbortRequest, context: Context
    ) -> generate_pb2.AbortResponse:
        attempt_id = request.attempt_id
        if not attempt_id:
            raise InvalidRequest("attempt_id is empty", param="attempt_id")
        if not self._front.ready:
            # Nothing was taken yet: whoever was asked has gone, and its pages need not wait for
            # the weights of the one that came in its place.
            return generate_pb2.AbortResponse(was_known=False)
        self._refuse(attempt_id)
        stop = self._stops.get(attempt_id)
        if stop is None:
            opened = self._open.get(attempt_id)
            # An attempt that was answered may still be pushing, on a rank that is not known
            # here any more: all are asked.
            ranks = range(self._front.settings.ranks) if opened is None else (opened.rank,)
            stop = _Stop(set(ranks), asyncio.get_running_loop().create_future())
            self._stops[attempt_id] = stop
            for rank in ranks:
                self._front.send(rank, Abort(attempt_id=attempt_id))
        return generate_pb2.AbortResponse(was_known=await asyncio.shield(stop.confirmed))

    # ---- WorkerService

    def on_message(self, rank: int, message: RankMessage) -> None:
        assert isinstance(message, Prefilled | Failed | Stopped), message
        self._unsettled.discard(message.attempt_id)
        match message:
            case Prefilled():
                self._resolve(message.attempt_id, message)
            case Failed():
                error = EpserveError.from_status(message.code, message.message)
                self._resolve(message.attempt_id, error)
            case Stopped():
                self._stopped(rank, message)
        self._front.on_change()

    def load(self, rank: int) -> Load:
        num_open = sum(opened.rank == rank for opened in self._open.values())
        return Load(num_open=num_open, num_waiting_tokens=self._choice.open_tokens[rank])

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_quiet(self) -> bool:
        return not (self._open or self._unsettled or self._stops)

    def hand_over(self, error: EpserveError) -> None:
        """A caller that is told so may use its pages at once: none is told before the rank has
        confirmed that it stopped. What is computed by then is answered."""
        for attempt_id, opened in self._open.items():
            if opened.stopped_by is None:
                opened.stopped_by = error
                self._front.send(opened.rank, Abort(attempt_id=attempt_id))

    def fail_all(self, error: EpserveError) -> None:
        for attempt_id, opened in self._open.items():
            self._front.send(opened.rank, Abort(attempt_id=attempt_id))
            self._resolve(attempt_id, error)

    async def close(self) -> None:
        error = Unavailable("worker is shutting down", failed_epoch=self._front.epoch)
        self.fail_all(error)
        for stop in self._stops.values():
            if not stop.confirmed.done():
                stop.confirmed.set_exception(error)
                stop.confirmed.exception()  # no one may be waiting any more
        self._stops.clear()

    # ---- inside

    def _check_meant(self, request: generate_pb2.PrefillRequest) -> None:
        """Refuses what this worker cannot or must not take."""
        front = self._front
        if not front.is_well:
            raise Unavailable("worker is not ready")
        if request.prefill_epoch != front.epoch:
            raise Mismatch(
                f"this worker's epoch is {front.epoch}, not {request.prefill_epoch!r}",
                failed_epoch=request.prefill_epoch,
            )
        if front.draining:
            raise Draining("worker is draining", failed_epoch=front.epoch)
        name = front.settings.model_name
        if request.model != name:
            raise ModelNotFound(f"model {request.model!r} is not served here, but {name!r} is")

    async def _prefill(self, submit: SubmitPrefill, prefix_hashes: bytes) -> Prefilled:
        attempt_id = submit.attempt_id
        if attempt_id in self._refused:
            raise Cancelled(f"attempt {attempt_id} was aborted before it arrived")
        if attempt_id in self._open:
            raise InvalidRequest(f"attempt {attempt_id} is in progress", param="attempt_id")
        num_tokens = submit.num_tokens
        rank = self._choice.choose(num_tokens, prefix_hashes)
        record = self.records.begin(_record_of(submit, rank))
        began, finish = time.monotonic(), "INTERNAL"
        outcome: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._open[attempt_id] = _Open(rank, num_tokens, outcome)
        self._unsettled.add(attempt_id)
        self.num_accepted_total += 1
        self._front.send(rank, submit)
        self._front.on_change()
        try:
            prefilled = await outcome
            finish = "OK"
            record.note_prefill(prefilled)
            record.queue_seconds = prefilled.queue_seconds
            record.first_token_seconds = time.monotonic() - began
            record.num_output_tokens = int(prefilled.token is not None)
            record_stages(prefilled, record)
            return prefilled
        except asyncio.CancelledError:
            finish = "CANCELLED"
            self._front.send(rank, Abort(attempt_id=attempt_id))
            raise
        except EpserveError as error:
            finish = error.status.grpc
            raise
        finally:
            self.records.end(record, finish, time.monotonic() - began)
            del self._open[attempt_id]
            self._choice.done(rank, num_tokens)
            self._front.on_change()

    def _resolve(self, attempt_id: str, result: Prefilled | EpserveError) -> None:
        """Ends the attempt's call, if there still is one."""
        opened = self._open.get(attempt_id)
        if opened is None or opened.outcome.done():
            return
        if isinstance(result, Prefilled):
            opened.outcome.set_result(result)
        else:
            opened.outcome.set_exception(result)

    def _stopped(self, rank: int, message: Stopped) -> None:
        attempt_id = message.attempt_id
        opened = self._open.get(attempt_id)
        asked = opened.stopped_by if opened is not None else None
        self._resolve(attempt_id, asked or Cancelled(f"attempt {attempt_id} was aborted"))
        stop = self._stops.get(attempt_id)
        if stop is None:
            return
        stop.ranks.discard(rank)
        stop.was_known = stop.was_known or message.was_known
        if not stop.ranks:
            del self._stops[attempt_id]
            if not stop.confirmed.done():
                stop.confirmed.set_result(stop.was_known)

    def _refuse(self, attempt_id: str) -> None:
        self._refused[attempt_id] = None
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)


def _record_of(submit: SubmitPrefill, rank: int) -> LegRecord:
    return LegRecord(
        leg_id=submit.request_id,
        rank=rank,
        num_prompt_tokens=submit.num_prompt_tokens,
        num_earlier_tokens=submit.num_tokens - submit.num_prompt_tokens,
    )
