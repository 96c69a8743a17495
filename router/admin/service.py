"""The Admin gRPC service: what operators see of the cluster, and what they change."""

from functools import partial
from typing import Any

import grpc

from core.errors import EpserveError, InvalidRequest
from core.log import LEVELS, get_logger, set_level
from core.version import software_version
from proto import router_pb2
from proto.worker_pb2 import DrainRequest, GetConfigRequest, SetLogLevelRequest
from proto.worker_pb2_grpc import WorkerStub
from router.admin.experts import ExpertsAdmin
from router.admin.processes import ANSWER_SECONDS, Process, Processes, ask_all, dial
from router.admin.requests import explain
from router.cluster import Cluster
from router.gateways import Gateway
from router.scheduling.pairing import paired, rejections
from router.settings import RouterSettings
from router.workers.worker import Worker
from rpc.admin_token import AdminToken, passed_on

log = get_logger("router.admin")

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str], ...]


class AdminService(ExpertsAdmin):
    """Every call needs `token`, and takes it along to the workers."""

    def __init__(
        self, cluster: Cluster, processes: Processes, settings: RouterSettings, token: AdminToken
    ) -> None:
        super().__init__(processes, token)
        self._cluster = cluster
        self._settings = settings

    async def GetStatus(
        self, request: router_pb2.GetStatusRequest, context: Context
    ) -> router_pb2.GetStatusResponse:
        self._token.check(context)
        workers = self._processes.workers()
        return router_pb2.GetStatusResponse(
            processes=[one.identity for one in self._processes.not_workers()],
            workers=[worker.status for worker in workers],
            rejected=[
                router_pb2.RejectedWorker(
                    identity=rejection.worker.identity, reason=rejection.reason
                )
                for rejection in rejections(workers)
            ],
            num_waiting=self._cluster.assigner.num_waiting,
            paired_epochs=[worker.epoch for worker in paired(workers)],
            lost=self._processes.lost(),
            longest_wait_seconds=self._cluster.assigner.longest_wait_seconds,
        )

    async def DrainWorker(
        self, request: router_pb2.DrainWorkerRequest, context: Context
    ) -> router_pb2.DrainWorkerResponse:
        self._token.check(context)
        worker = self._processes.find_worker(request.worker)
        others = self._processes.other_nodes(worker)
        drain = DrainRequest(undo=request.undo)
        if request.HasField("grace_seconds"):
            drain.grace_seconds = request.grace_seconds
        metadata = passed_on(context)
        # All are told before any failure is: the rest of a group is of no use alone.
        failures = await ask_all(partial(_drain, drain, metadata), [worker, *others])
        for failure in failures:
            if failure is not None:
                raise failure
        return router_pb2.DrainWorkerResponse(
            worker=worker.identity, others=[one.identity for one in others]
        )

    async def GetConfig(
        self, request: router_pb2.GetProcessConfigRequest, context: Context
    ) -> router_pb2.GetProcessConfigResponse:
        self._token.check(context)
        metadata = passed_on(context)
        processes = self._meant(request.process)
        configs = await ask_all(partial(self._config, metadata), processes)
        return router_pb2.GetProcessConfigResponse(processes=configs)

    async def SetLogLevel(
        self, request: router_pb2.SetProcessLogLevelRequest, context: Context
    ) -> router_pb2.SetProcessLogLevelResponse:
        self._token.check(context)
        level = request.level.lower()
        if level not in LEVELS:
            raise InvalidRequest(
                f"{request.level!r} is no log level: use one of {', '.join(LEVELS)}", param="level"
            )
        metadata = passed_on(context)
        processes = self._meant(request.process)
        levels = await ask_all(partial(_set_level, level, metadata), processes)
        return router_pb2.SetProcessLogLevelResponse(processes=levels)

    async def ExplainRequest(
        self, request: router_pb2.AdminExplainRequest, context: Context
    ) -> router_pb2.AdminExplainResponse:
        self._token.check(context)
        request_id = request.request_id
        if not request_id:
            raise InvalidRequest("request_id is empty", param="request_id")
        assignments = self._cluster.records.find(request_id)
        return await explain(request_id, assignments, self._processes.workers())

    def _meant(self, name: str) -> list[Process]:
        return [self._processes.find(name)] if name else self._processes.all()

    async def _config(self, metadata: Metadata, process: Process) -> router_pb2.ProcessConfig:
        config = router_pb2.ProcessConfig(identity=process.identity)
        match process:
            case Gateway():
                config.config_json, config.version = process.config_json, process.version
            case Worker():
                try:
                    async with dial(process) as peer:
                        reply = await WorkerStub(peer).GetConfig(
                            GetConfigRequest(), timeout=ANSWER_SECONDS, metadata=metadata
                        )
                    config.config_json, config.version = reply.config_json, reply.version
                except EpserveError as error:
                    config.error = error.message
            case _:
                config.config_json = self._settings.public_json()
                config.version = software_version()
        return config


async def _drain(drain: DrainRequest, metadata: Metadata, worker: Worker) -> EpserveError | None:
    """Why it could not be told, if it could not."""
    try:
        async with dial(worker) as peer:
            await WorkerStub(peer).Drain(drain, timeout=ANSWER_SECONDS, metadata=metadata)
    except EpserveError as error:
        return error
    log.info("operator drains worker", worker=worker.name, undo=drain.undo)
    return None


async def _set_level(
    level: str, metadata: Metadata, process: Process
) -> router_pb2.ProcessLogLevel:
    answer = router_pb2.ProcessLogLevel(identity=process.identity)
    match process:
        case Gateway():
            answer.previous = process.log_level
            process.wanted_log_level = level
        case Worker():
            try:
                async with dial(process) as peer:
                    reply = await WorkerStub(peer).SetLogLevel(
                        SetLogLevelRequest(level=level), timeout=ANSWER_SECONDS, metadata=metadata
                    )
                answer.previous = reply.previous
            except EpserveError as error:
                answer.error = error.message
        case _:
            answer.previous = set_level(level)
            log.info("log level set", level=level, previous=answer.previous)
    return answer
