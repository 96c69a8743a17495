"""A router in the test's own event loop, and what is needed to wait for it, not to sleep."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from core.errors import EpserveError
from proto.router_pb2 import AssignRequest, AssignResponse, GetStatusRequest, GetStatusResponse
from proto.router_pb2_grpc import AdminStub, RouterStub
from router.process import RouterProcess
from router.settings import RouterSettings
from router.workers.table import StatusArrived, StreamBroken
from router.workers.worker import Worker, WorkerState
from rpc.client import channel, to_error
from tests.eventually import eventually
from tests.router.fake_worker import FakeWorker

PATIENCE_SECONDS = 30.0


class RunningRouter:
    """Observes every event of a worker; the services are called through real sockets."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - fields of RouterSettings
        self.process = RouterProcess(RouterSettings(max_backoff_seconds=0.05, **settings))
        self.cluster = self.process.cluster
        self.stop = asyncio.Event()
        self._stepped = asyncio.Event()
        apply = self.cluster.apply

        def observed(event: StatusArrived | StreamBroken) -> None:
            apply(event)
            self._stepped.set()

        self.cluster.apply = observed  # type: ignore[method-assign]
        self.task = asyncio.create_task(self.process.run(self.stop))
        self._channel = channel(self.process.address)
        self.router = RouterStub(self._channel)
        self.admin = AdminStub(self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(self._channel)

    async def close(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, PATIENCE_SECONDS)
        await self._channel.close(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once `holds` after some event of a worker."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds():
                self._stepped.clear()
                await self._stepped.wait()

    async def until_ready(self, *workers: FakeWorker) -> None:
        addresses = {worker.address for worker in workers}
        await self.until(lambda: addresses <= self.in_state(WorkerState.READY))

    def seen(self, worker: FakeWorker) -> Worker:
        """What the router has in its table for this worker."""
        (record,) = [w for w in self.cluster.table.workers if w.address == worker.address]
        return record

    def in_state(self, state: WorkerState) -> set[str]:
        return {w.address for w in self.cluster.table.workers if w.state is state}

    def epochs(self) -> set[str]:
        return {w.epoch for w in self.cluster.table.workers if w.state is WorkerState.READY}

    async def until_waiting(self, number: int) -> None:
        """Assign calls arrive without any event of a worker: look at each turn of the loop."""
        await eventually(lambda: self.cluster.assigner.num_waiting == number, PATIENCE_SECONDS)

    def call(self, **fields: Any) -> "grpc.aio.UnaryUnaryCall[Any, AssignResponse]":  # noqa: ANN401 - fields of AssignRequest
        request = AssignRequest(**{"model": "demo", "num_prompt_tokens": 100, **fields})
        return self.router.Assign(request, timeout=PATIENCE_SECONDS)

    async def assign(self, **fields: Any) -> AssignResponse:  # noqa: ANN401 - as above
        return await self.call(**fields)

    async def refusal(self, **fields: Any) -> EpserveError:  # noqa: ANN401 - as above
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(**fields)
        return to_error(caught.value)

    async def status(self) -> GetStatusResponse:
        return await self.admin.GetStatus(GetStatusRequest(), timeout=PATIENCE_SECONDS)
