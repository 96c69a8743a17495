"""The `Worker` gRPC service: the worker's state as a stream, and what operators may ask of it."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from core.errors import InvalidRequest, NotFound
from core.log import LEVELS, get_logger, set_level
from core.process import Identity
from core.version import software_version
from engine.experts.expert_group import ExpertGroup
from engine.link.messages import LogLevel
from engine.process.front import WorkerFront
from engine.process.pairing_version import pairing_version
from engine.server.drain import Drain
from engine.server.worker_service import WorkerService
from proto import worker_pb2, worker_pb2_grpc
from rpc.admin_token import AdminToken
from rpc.identity import identity_message

log = get_logger("engine.status_service")

# A stream never sends more often than this, whatever its client asks for.
LEAST_INTERVAL_SECONDS = 0.02
LONGEST_SILENCE_SECONDS = 1.0
LONGEST_GRACE_SECONDS = 86_400.0

Context = grpc.aio.ServicerContext[Any, Any]


class StatusService(worker_pb2_grpc.WorkerServicer):
    """Its streams end with their client or with the server, which cancels them."""

    def __init__(
        self,
        front: WorkerFront,
        service: WorkerService,
        drain: Drain,
        experts: ExpertGroup,
        identity: Identity,
    ) -> None:
        self._front = front
        self._service = service
        self._drain = drain
        self._experts = experts
        self._identity = identity_message(identity)
        self._token = AdminToken(front.settings.admin_token_file)
        self._watchers: set[asyncio.Event] = set()

    def changed(self) -> None:
        """Wakes every stream."""
        for watcher in self._watchers:
            watcher.set()

    async def WatchStatus(  # noqa: N802 - the name is the contract's
        self, request: worker_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        interval = min(
            max(request.min_interval_ms / 1000, LEAST_INTERVAL_SECONDS), LONGEST_SILENCE_SECONDS
        )
        dirty = asyncio.Event()
        self._watchers.add(dirty)
        try:
            while True:
                dirty.clear()
                yield self.status()
                await asyncio.sleep(interval)
                # NOTE: not wait_for, which in Python 3.11 may swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_SILENCE_SECONDS - interval):
                        await dirty.wait()
        finally:
            self._watchers.discard(dirty)

    async def Drain(  # noqa: N802 - as above
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self._token.check(context)
        if request.undo:
            self._drain.undo()
            return worker_pb2.DrainResponse()
        grace = self._front.settings.stop_grace_seconds
        if request.HasField("grace_seconds"):
            grace = request.grace_seconds
        if not (math.isfinite(grace) and 0 <= grace <= LONGEST_GRACE_SECONDS):
            raise InvalidRequest(
                f"grace_seconds is {grace}, not within 0 and {LONGEST_GRACE_SECONDS:g}",
                param="grace_seconds",
            )
        self._drain.begin(grace)
        return worker_pb2.DrainResponse()

    async def GetConfig(  # noqa: N802 - as above
        self, request: worker_pb2.GetConfigRequest, context: Context
    ) -> worker_pb2.GetConfigResponse:
        return worker_pb2.GetConfigResponse(
            config_json=self._front.settings.public_json(), version=software_version()
        )

    async def SetLogLevel(  # noqa: N802 - as above
        self, request: worker_pb2.SetLogLevelRequest, context: Context
    ) -> worker_pb2.SetLogLevelResponse:
        self._token.check(context)
        level = request.level.lower()
        if level not in LEVELS:
            raise InvalidRequest(
                f"{request.level!r} is no log level: use one of {', '.join(LEVELS)}", param="level"
            )
        previous = set_level(level)
        for rank in range(len(self._front.ready)):
            self._front.send(rank, LogLevel(level=level))
        log.info("log level set", level=level, previous=previous)
        return worker_pb2.SetLogLevelResponse(previous=previous)

    async def ExplainRequest(  # noqa: N802 - as above
        self, request: worker_pb2.ExplainRequestRequest, context: Context
    ) -> worker_pb2.ExplainRequestResponse:
        legs = self._service.records.find(request.request_id) if request.request_id else []
        if not legs:
            raise NotFound(f"this worker remembers no request {request.request_id!r}")
        return worker_pb2.ExplainRequestResponse(legs=[leg.message(self._identity) for leg in legs])

    def status(self) -> worker_pb2.WorkerStatus:
        """The worker's state as of now."""
        front = self._front
        status = worker_pb2.WorkerStatus(
            identity=self._identity,
            model=front.settings.model_name,
            ready=front.is_well,
            draining=front.draining,
            num_accepted_total=self._service.num_accepted_total,
            num_open=self._service.num_open,
            drained=self._drain.is_drained,
            expert_group=self._experts.status(),
            pairing_version=pairing_version(),
        )
        if front.ready:
            status.kv_fingerprint = front.ready[0].kv_fingerprint
            status.page_tokens = front.ready[0].page_tokens
            status.max_model_len = front.ready[0].max_model_len
            status.ranks.extend(self._rank(rank) for rank in range(len(front.ready)))
        return status

    def _rank(self, rank: int) -> worker_pb2.RankStatus:
        ready, stats = self._front.ready[rank], self._front.stats[rank]
        load = self._service.load(rank)
        return worker_pb2.RankStatus(
            rank=rank,
            device=ready.device,
            num_running=stats.num_running,
            # The front's own count: what it has just handed out, the rank has yet to tell of.
            num_waiting=max(0, load.num_open - stats.num_running),
            num_waiting_tokens=max(load.num_waiting_tokens, stats.num_waiting_tokens),
            pages_total=ready.pages_total,
            pages_free=stats.pages_free if stats.pages_total else ready.pages_total,
            pages_quarantined=stats.pages_quarantined,
            pages_cached=stats.pages_cached,
            num_steps=stats.num_steps,
            pid=ready.pid,
            max_running=ready.max_running,
            quiet_seconds=self._front.quiet_seconds[rank],
            stalled=rank in self._front.stalled,
            slow=rank in self._front.slow,
        )
