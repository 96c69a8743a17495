"""A worker as the router sees one: a real gRPC server that says what the test wants."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from proto import worker_pb2
from proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from rpc.server import RpcServer
from tests.router.statuses import make_status

HEARTBEAT_SECONDS = 0.5


class FakeWorker(WorkerServicer):
    """Use it as an async context manager; leaving kills it, as SIGKILL would."""

    def __init__(self, role: str, epoch: str, *, listen: str = "127.0.0.1:0", **facts: Any) -> None:  # noqa: ANN401 - as make_status takes them
        self._role, self._epoch, self._facts = role, epoch, facts
        self._listen = listen
        self._changed = asyncio.Condition()
        self._num_changes = 0
        self.silent = False
        self.end_streams = False

    @property
    def address(self) -> str:
        return self._server.address

    async def __aenter__(self) -> Self:
        self._server = RpcServer(self._listen)
        self._server.add(add_WorkerServicer_to_server, self, worker_pb2, "Worker")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        await self._server.stop(0)

    async def say(self, **facts: Any) -> None:  # noqa: ANN401 - as make_status takes them
        """Changes the status and tells every watcher."""
        async with self._changed:
            self._facts |= facts
            self._num_changes += 1
            self._changed.notify_all()

    async def WatchStatus(
        self,
        request: worker_pb2.WatchStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        while not self.end_streams:
            seen = self._num_changes
            if not self.silent:
                yield make_status(self._role, self._epoch, **self._facts)
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS), self._changed:
                    while self._num_changes == seen:
                        await self._changed.wait()
            except TimeoutError:
                continue
