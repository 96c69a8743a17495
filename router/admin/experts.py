"""The part of the Admin service that is about experts: passed on to node 0 of the group meant."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from core.errors import InvalidRequest, Mismatch, NotFound
from core.log import get_logger
from proto import router_pb2
from proto.experts_pb2 import ExpertLoad, RebalancePlan, RebalanceProgress, RollBackRequest
from proto.experts_pb2_grpc import ExpertsStub
from proto.router_pb2_grpc import AdminServicer
from router.admin.processes import ANSWER_SECONDS, Processes, dial, while_there
from router.workers.worker import Worker, WorkerState
from rpc.admin_token import AdminToken, passed_on

log = get_logger("router.admin")

# Once a group has answered, which it does at its next step, planning for a large one takes a
# fraction of a second; on a machine that is busy more.
PLAN_SECONDS = 60.0

Context = grpc.aio.ServicerContext[Any, Any]
Progress = grpc.aio.UnaryStreamCall[Any, RebalanceProgress]


class ExpertsAdmin(AdminServicer):
    """Abstract: `AdminService` adds the rest."""

    def __init__(self, processes: Processes, token: AdminToken) -> None:
        self._processes = processes
        self._token = token

    async def GetExpertLoad(
        self, request: router_pb2.GroupExpertLoadRequest, context: Context
    ) -> ExpertLoad:
        self._token.check(context)
        async with dial(self._speaker(request.group)) as peer:
            return await ExpertsStub(peer).GetLoad(
                request.load, timeout=ANSWER_SECONDS, metadata=passed_on(context)
            )

    async def PlanRebalance(
        self, request: router_pb2.GroupPlanRequest, context: Context
    ) -> RebalancePlan:
        self._token.check(context)
        worker = self._speaker(request.group)
        async with dial(worker) as peer:
            answer = ExpertsStub(peer).Plan(
                request.plan, timeout=PLAN_SECONDS, metadata=passed_on(context)
            )
            return await while_there(worker, answer)

    async def ApplyRebalance(
        self, request: router_pb2.GroupApplyRequest, context: Context
    ) -> AsyncIterator[RebalanceProgress]:
        self._token.check(context)
        worker = self._speaker(request.group)
        log.info("operator rebalances experts", group=group_name(worker))
        async with dial(worker) as peer:
            progress = ExpertsStub(peer).Apply(request.apply, metadata=passed_on(context))
            async for one in _heard(worker, progress):
                yield one

    async def RollBackRebalance(
        self, request: router_pb2.GroupRollBackRequest, context: Context
    ) -> AsyncIterator[RebalanceProgress]:
        self._token.check(context)
        worker = self._speaker(request.group)
        log.info("operator rolls back experts", group=group_name(worker))
        async with dial(worker) as peer:
            progress = ExpertsStub(peer).RollBack(RollBackRequest(), metadata=passed_on(context))
            async for one in _heard(worker, progress):
                yield one

    def _speaker(self, name: str) -> Worker:
        """Node 0 of a group. NotFound for one that is not there, InvalidRequest where it is not
        clear which is meant, Mismatch for one that is not whole."""
        workers = [worker for worker in self._processes.workers() if group_name(worker)]
        names = sorted({group_name(worker) for worker in workers})
        if not name:
            name = _only_group(workers, names)
        nodes = [worker for worker in workers if group_name(worker) == name]
        if not nodes:
            raise NotFound(f"there is no expert group {name!r} here, but {_listed(names)}")
        _check_whole(name, nodes)
        return next(worker for worker in nodes if worker.status.expert_group.node_rank == 0)


async def _heard(worker: Worker, progress: Progress) -> AsyncIterator[RebalanceProgress]:
    while isinstance(one := await while_there(worker, progress.read()), RebalanceProgress):
        yield one


def group_name(worker: Worker) -> str:
    """Empty for a worker that tells of none."""
    return worker.status.expert_group.name


def _only_group(workers: list[Worker], names: list[str]) -> str:
    """Where nothing is said: the only group of several ranks, or the only one of all."""
    spread = {group_name(one) for one in workers if one.status.expert_group.num_ranks > 1}
    candidates = sorted(spread) or names
    if not candidates:
        raise NotFound("there is no expert group here")
    if len(candidates) > 1:
        raise InvalidRequest(f"which expert group? There are {_listed(candidates)}", param="group")
    return candidates[0]


def _check_whole(name: str, nodes: list[Worker]) -> None:
    ranks = [worker.status.expert_group.node_rank for worker in nodes]
    if len(set(ranks)) < len(ranks):
        addresses = ", ".join(worker.address for worker in nodes)
        raise InvalidRequest(f"several expert groups are named {name!r}: {addresses}")
    missing = sorted(set(range(nodes[0].status.expert_group.num_nodes)) - set(ranks))
    if missing:
        raise Mismatch(f"expert group {name!r} is not whole: node {missing[0]} is missing")
    for worker in nodes:
        if worker.state not in (WorkerState.READY, WorkerState.DRAINING):
            raise Mismatch(
                f"expert group {name!r} is not whole: worker {worker.name} is {worker.state.value}"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
