"""Which process an operator means, and the way to it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from core.clock import Clock
from core.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from proto.router_pb2 import LostWorker
from proto.worker_pb2 import ProcessIdentity
from router.gateways import Gateway, GatewayTable
from router.workers.table import WorkerTable
from router.workers.worker import Worker, WorkerState
from rpc.client import channel, to_error
from rpc.status import is_servers_word

# Operators' calls to a worker, which answers them from memory; who asks us gives up after 5 s.
ANSWER_SECONDS = 4.0
# How often it is looked whether a worker that takes its time is still there.
LOOK_SECONDS = 0.5
MAX_CALLS = 32


@dataclass(frozen=True, slots=True)
class ThisRouter:
    identity: ProcessIdentity


Process = ThisRouter | Gateway | Worker
Asked = TypeVar("Asked", bound=Process)
Answer = TypeVar("Answer")


class Processes:
    """All that this router knows of; `router` is its own identity."""

    def __init__(
        self, router: ProcessIdentity, table: WorkerTable, gateways: GatewayTable, clock: Clock
    ) -> None:
        self._router = ThisRouter(router)
        self._table = table
        self._gateways = gateways
        self._clock = clock

    def workers(self) -> list[Worker]:
        """Those that are there, by role and address."""
        present = [one for one in self._table.workers if one.state is not WorkerState.LOST]
        return sorted(present, key=lambda worker: (worker.role, worker.address))

    def lost(self) -> list[LostWorker]:
        """Workers that discovery still names and nobody hears, longest first."""
        now = self._clock.now()
        return [
            LostWorker(identity=one.identity, seconds=now - one.lost_at, reason=one.lost_reason)
            for one in sorted(self._table.workers, key=lambda worker: worker.lost_at)
            if one.lost
        ]

    def not_workers(self) -> list[Process]:
        return [self._router, *self._gateways.alive(self._clock.now())]

    def all(self) -> list[Process]:
        return [*self.not_workers(), *self.workers()]

    def find(self, name: str) -> Process:
        """By name, address or epoch. Raises NotFound, and InvalidRequest where several have
        the name."""
        return _only(name, self.all())

    def find_worker(self, name: str) -> Worker:
        """As `find`, and Unavailable for one that was lost, unless another has its name by now."""
        try:
            return _only(name, self.workers())
        except NotFound:
            worker = _only(name, self._table.workers)
            raise Unavailable(f"worker {worker.name} at {worker.address} is lost") from None

    def other_nodes(self, worker: Worker) -> list[Worker]:
        """Those that are there of an EP group that spans nodes."""
        group = worker.status.expert_group
        if group.num_nodes < 2:
            return []
        return [
            one
            for one in self.workers()
            if one.role == worker.role
            and one.epoch != worker.epoch
            and one.status.expert_group.name == group.name
            and one.status.expert_group.num_nodes > 1
        ]


@asynccontextmanager
async def dial(worker: Worker) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel for calls within the block; an EpserveError says why one failed, and names the
    worker where that did not answer or is about to leave."""
    async with channel(worker.address) as peer:
        try:
            yield peer
        except grpc.aio.AioRpcError as error:
            meant = to_error(error, peer_epoch=worker.epoch)
            if isinstance(meant, Unavailable | DeadlineExceeded):
                verdict = "says" if is_servers_word(error) else "does not answer"
                meant.message = f"{_title(worker)} {verdict}: {meant.message}"
            raise meant from error


async def while_there(worker: Worker, answer: Awaitable[Answer]) -> Answer:
    """The answer, however long it takes `worker`; Unavailable once that is lost, with none."""
    answering = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({answering}, timeout=LOOK_SECONDS))[0]:
            if worker.lost:
                raise Unavailable(f"{_title(worker)} does not answer any more")
        return answering.result()
    finally:
        answering.cancel()


def _title(worker: Worker) -> str:
    return f"worker {worker.name} at {worker.address}"


async def ask_all(
    ask: Callable[[Asked], Awaitable[Answer]], processes: Sequence[Asked]
) -> list[Answer]:
    """The answers in the order of `processes`, so many of which are asked at once."""
    room = asyncio.Semaphore(MAX_CALLS)

    async def ask_one(process: Asked) -> Answer:
        async with room:
            return await ask(process)

    return await asyncio.gather(*map(ask_one, processes))


def _only(name: str, processes: Sequence[Asked]) -> Asked:
    if not name:
        raise InvalidRequest("which process? Its name is empty")
    found = []
    for process in processes:
        if name in (process.identity.address, process.identity.epoch):
            return process
        if name == process.identity.name:
            found.append(process)
    if not found:
        names = ", ".join(sorted(one.identity.name for one in processes)) or "none"
        raise NotFound(f"there is no process {name!r} here, but {names}")
    if len(found) > 1:
        addresses = ", ".join(one.identity.address for one in found)
        raise InvalidRequest(f"{len(found)} processes are named {name!r}: use one of {addresses}")
    return found[0]
