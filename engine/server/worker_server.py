"""The front process of a worker from its first line to its exit status, for both roles.

starting -> serving -> draining -> stopped (status 0)
    |         |  ^ |-------`-- a rank died -> failed (status 1)
    |      stalled: a rank ends no step; not ready, requests move
    `---- a rank cannot start --------------> failed (status 1)

The first SIGTERM or SIGINT drains the worker, the second ends it at once.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import grpc

from core import log as logging
from core import metrics, tracing
from core.address import parse_address
from core.errors import Unavailable
from core.process import Identity
from engine.experts.expert_group import ExpertGroup
from engine.experts.expert_metrics import ExpertMetrics
from engine.experts.experts_service import ExpertsService
from engine.link.messages import ExpertAnswer, RankMessage
from engine.process.front import StartError, WorkerFront
from engine.process.settings import WorkerSettings
from engine.server.drain import Drain
from engine.server.status_service import StatusService
from engine.server.worker_metrics import WorkerMetrics
from engine.server.worker_service import WorkerService
from proto import experts_pb2, experts_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc import cluster_credentials
from rpc.admin_token import AdminToken
from rpc.server import RpcServer

log = logging.get_logger("engine.worker_server")

# How long calls that have just been failed may take to tell their clients.
FLUSH_SECONDS = 0.5
RANK_STOP_SECONDS = 1.0
# What was handed over after the grace lets go of its pages within this, or is given up.
RELEASE_SECONDS = 5.0

Register = Callable[[Any, grpc.aio.Server], None]
ServiceFactory = Callable[[WorkerFront, WorkerMetrics], WorkerService]


class RoleService(NamedTuple):
    """The gRPC service of a role: how to build it and how to register it."""

    role: str
    build: ServiceFactory
    register: Register
    module: ModuleType
    name: str


class WorkerServer:
    """One worker. `run` does it all; `command` replaces the rank's command line in tests."""

    def __init__(
        self, settings: WorkerSettings, role: RoleService, command: tuple[str, ...] = ()
    ) -> None:
        self.settings = settings
        self.front = WorkerFront(settings, role.role, command)
        registry = metrics.ProcessRegistry(role=role.role)
        self.metrics = WorkerMetrics(
            registry,
            role.role,
            lambda: self.front.stats,
            lambda: self.front.ready,
            lambda: self.front.quiet_seconds,
        )
        self.metrics.draining.set_function(lambda: self.front.draining)
        self.metrics.slow.set_function(lambda: bool(self.front.slow))
        self.metrics.stalled.set_function(lambda: bool(self.front.stalled))
        self.service = role.build(self.front, self.metrics)
        self.server = RpcServer(settings.listen)
        host = parse_address(settings.listen).host
        self._metrics_server = metrics.serve(settings.metrics_port, registry, host)
        identity = Identity(
            role=role.role,
            name=settings.name or role.role,
            address=settings.address_at(self.server.bound_port),
            epoch=self.front.epoch,
        )
        self.drain = Drain(self.front, self.service)
        self.experts = ExpertGroup(self.front, ExpertMetrics(registry))
        self.status = StatusService(self.front, self.service, self.drain, self.experts, identity)
        self.stop_asked = asyncio.Event()
        self.hurry_asked = asyncio.Event()
        self._change = asyncio.Event()
        self.front.on_message = self._hear
        self.front.on_stats = lambda _rank, stats: self.metrics.observe(stats)
        self.front.on_change = self._changed
        self.front.on_stall = self._stalled
        self.server.add(role.register, self.service, role.module, role.name)
        self.server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server,
            self.status,
            worker_pb2,
            "Worker",
            multiplexed=(),
        )
        self.server.add(
            experts_pb2_grpc.add_ExpertsServicer_to_server,
            ExpertsService(self.experts, AdminToken(settings.admin_token_file)),
            experts_pb2,
            "Experts",
            multiplexed=(),
        )

    def _hear(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, ExpertAnswer):
            self.experts.on_message(message)
        else:
            self.service.on_message(rank, message)

    async def run(self) -> int:
        """The process's exit status, once everything of it is gone."""
        try:
            return await self._run()
        finally:
            self.drain.close()
            await self.experts.close()
            await self.service.close()
            await self.server.stop(0)
            await self.front.stop(self._rank_stop_seconds(), self.hurry_asked)
            self._metrics_server.close()

    async def _run(self) -> int:
        await self.server.start(serving=False)
        log.info(
            "listening",
            address=self.server.address,
            metrics_port=self._metrics_server.port,
            epoch=self.front.epoch,
        )
        stop = asyncio.ensure_future(self.stop_asked.wait())
        start = asyncio.ensure_future(self.front.start())
        await _first_of(start, stop)
        if not start.done():
            start.cancel()
            with suppress(asyncio.CancelledError):
                await start
            return 0
        try:
            start.result()
        except StartError as error:
            stop.cancel()
            log.error("cannot start", reason=str(error))
            return 1
        await self.server.set_serving(True)
        health = asyncio.ensure_future(self._tell_health())
        self.experts.begin()
        log.info("serving", model=self.settings.model_name)
        await _first_of(self.front.died, stop)
        stop.cancel()
        health.cancel()
        if self.front.died.done():
            return await self._fail()
        return await self._leave()

    async def _leave(self) -> int:
        """Takes nothing new, lets open requests finish within the grace, hands over the rest, and
        waits until no page is waited for any more. The process's exit status."""
        await self.server.set_serving(False)
        grace = self.settings.stop_grace_seconds
        self.drain.begin(grace, final=True)
        drained = asyncio.ensure_future(self.drain.drained())
        hurry = asyncio.ensure_future(self.hurry_asked.wait())
        await _first_of(drained, hurry, self.front.died, timeout=grace + RELEASE_SECONDS)
        hurry.cancel()
        drained.cancel()
        if self.front.died.done():
            return await self._fail()
        if self.drain.is_drained:
            await self.server.stop(FLUSH_SECONDS)
            return 0
        log.warning("leaving before drained", num_open=self.service.num_open)
        await self._fail_open("worker is shutting down")
        return 0

    async def _fail(self) -> int:
        reason = self.front.died.result()
        log.error("worker failed", reason=reason)
        await self._fail_open(f"worker failed: {reason}")
        return 1

    def _rank_stop_seconds(self) -> float:
        """How long ranks may take to leave: they do so with those of the group's other nodes,
        which may be draining just as long."""
        if self.settings.nodes == 1:
            return RANK_STOP_SECONDS
        return self.settings.stop_grace_seconds + RELEASE_SECONDS

    def _stalled(self, reason: str) -> None:
        """Nobody waits for ranks that may never go on; those that do find requests aborted."""
        self.metrics.num_stalls.inc()
        error = Unavailable(f"worker is stalled: {reason}", failed_epoch=self.front.epoch)
        self.service.fail_all(error)

    def _changed(self) -> None:
        self.drain.note_change()
        self.status.changed()
        self._change.set()

    async def _tell_health(self) -> None:
        """A worker that drains or is stalled is not ready, for probes as for routers; until it is
        taken back, or goes on."""
        told = True
        while True:
            serves = self.front.is_well and not self.front.draining
            if told != serves:
                told = serves
                await self.server.set_serving(told)
            self._change.clear()
            await self._change.wait()

    async def _fail_open(self, message: str) -> None:
        self.service.fail_all(Unavailable(message, failed_epoch=self.front.epoch))
        await self.server.stop(FLUSH_SECONDS)


async def _first_of(*waits: "asyncio.Future[Any]", timeout: float | None = None) -> None:
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def run_worker(settings: WorkerSettings, role: RoleService) -> int:
    """Runs a worker until SIGTERM, SIGINT or the end of a rank; the exit status."""
    logging.configure(
        role.role, settings.name or role.role, settings.log_level, settings.log_format
    )
    try:
        cluster_credentials.use(settings)
        tracing.configure(
            role.role, settings.name, settings.otlp_endpoint, settings.trace_sample_ratio
        )
    except ValueError as error:
        log.error("cannot start", reason=str(error))
        return 1
    try:
        return asyncio.run(_serve(settings, role))
    finally:
        tracing.shutdown()


async def _serve(settings: WorkerSettings, role: RoleService) -> int:
    try:
        worker = WorkerServer(settings, role)
    except OSError as error:
        log.error("cannot start", reason=str(error))
        return 1
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(stop_by_signal, worker, number))
    return await worker.run()


def stop_by_signal(worker: WorkerServer, number: signal.Signals) -> None:
    """The first one drains the worker, the next one ends it at once."""
    log.info("stopping", signal=number.name, at_once=worker.stop_asked.is_set())
    if worker.stop_asked.is_set():
        worker.hurry_asked.set()
    worker.stop_asked.set()
