"""A node of an expert group as the router sees one: says what the test wants, notes what it is
asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self

import grpc
from google.protobuf.message import Message

from proto import experts_pb2, worker_pb2
from proto.experts_pb2_grpc import ExpertsServicer, add_ExpertsServicer_to_server
from proto.worker_pb2_grpc import add_WorkerServicer_to_server
from rpc.server import RpcServer
from tests.router.fake_worker import FakeWorker

if TYPE_CHECKING:
    from core.errors import EpserveError

LOAD = experts_pb2.ExpertLoad(
    group="pool",
    placement_version=3,
    num_ranks=2,
    slots_per_rank=3,
    num_logical=4,
    window_seconds=60,
    num_tokens=100,
    layers=[
        experts_pb2.LayerLoad(
            layer=1,
            tokens=[150, 0, 30, 20],
            physical_to_logical=[0, 1, 2, 3, 0, -1],
            rank_tokens=[105, 95],
            balancedness=0.952,
        ),
        experts_pb2.LayerLoad(
            layer=2,
            tokens=[0, 0, 0, 0],
            physical_to_logical=[0, 1, 2, 3, 0, -1],
            rank_tokens=[0, 0],
            balancedness=1.0,
        ),
    ],
)
PLAN = experts_pb2.RebalancePlan(
    group="pool",
    placement_version=3,
    num_moves=1,
    num_bytes=2_500_000,
    seconds=0.25,
    balancedness_before=0.5,
    balancedness_after=0.9,
    layers=[
        experts_pb2.LayerPlan(
            layer=1,
            balancedness_before=0.4,
            balancedness_after=0.8,
            num_moves=1,
            physical_to_logical=[0, 1, 2, 3, 0, 1],
        )
    ],
    traffic=[experts_pb2.RankPairBytes(source=0, destination=1, num_bytes=2_500_000)],
)
Context = grpc.aio.ServicerContext[Any, Any]
Phase = experts_pb2.RebalanceProgress


class FakeNode(FakeWorker, ExpertsServicer):
    def __init__(
        self,
        epoch: str,
        group: str = "pool",
        *,
        node_rank: int = 0,
        num_nodes: int = 1,
        num_ranks: int = 2,
        **facts: Any,
    ) -> None:
        told = worker_pb2.ExpertGroup(
            name=group, node_rank=node_rank, num_nodes=num_nodes, num_ranks=num_ranks, num_layers=2
        )
        super().__init__("decode", epoch, expert_group=told, **facts)
        self.asked: list[Message] = []
        self.refusal: EpserveError | None = None
        self.hangs = False

    async def __aenter__(self) -> Self:
        self._server = RpcServer(self._listen)
        self._server.add(add_WorkerServicer_to_server, self, worker_pb2, "Worker")
        self._server.add(add_ExpertsServicer_to_server, self, experts_pb2, "Experts")
        await self._server.start()
        return self

    async def GetLoad(
        self, request: experts_pb2.GetLoadRequest, context: Context
    ) -> experts_pb2.ExpertLoad:
        await self._hear(request)
        return LOAD

    async def Plan(
        self, request: experts_pb2.PlanRequest, context: Context
    ) -> experts_pb2.RebalancePlan:
        await self._hear(request)
        return PLAN

    async def Apply(
        self, request: experts_pb2.ApplyRequest, context: Context
    ) -> AsyncIterator[experts_pb2.RebalanceProgress]:
        await self._hear(request)
        async for progress in _progress():
            yield progress

    async def RollBack(
        self, request: experts_pb2.RollBackRequest, context: Context
    ) -> AsyncIterator[experts_pb2.RebalanceProgress]:
        await self._hear(request)
        async for progress in _progress():
            yield progress

    async def _hear(self, request: Message) -> None:
        self.asked.append(request)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.refusal is not None:
            raise self.refusal


async def _progress() -> AsyncIterator[experts_pb2.RebalanceProgress]:
    yield Phase(phase=Phase.PHASE_MOVING, num_layers=1, num_bytes=2_500_000)
    yield Phase(
        phase=Phase.PHASE_DONE,
        num_layers_done=1,
        num_layers=1,
        num_bytes_done=2_500_000,
        num_bytes=2_500_000,
        seconds=0.3,
        placement_version=4,
        balancedness=0.9,
    )
