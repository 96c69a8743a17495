"""Workers behind a router and a gateway: requests must end well, whatever becomes of the workers.

Real are `GenerateCall` with its policy and its connections, and all of the router but its sockets.
Gateway and router do not fail, and hear each other at once.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, Self
from unittest.mock import patch

import grpc

from core.clock import ManualClock
from core.errors import EpserveError
from core.token_ids import pack_ids
from gateway.cluster.channels import ChannelPool
from gateway.cluster.client import Cluster, GenerateCall
from gateway.cluster.failover_policy import FailoverBounds
from gateway.cluster.job import Prompt
from proto.generate_pb2 import GenerateRequest, GenerateResponse, SamplingParams
from proto.worker_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    ProcessIdentity,
    RankStatus,
    WorkerStatus,
)
from router.cluster import Cluster as RouterCluster
from router.service import RouterService
from router.settings import RouterSettings
from router.workers.table import StatusArrived, StreamBroken
from router.workers.worker import WorkerState
from rpc.status import to_error
from tests.protocol.network import Call, Channel, Choice, Context, Network, Over
from tests.protocol.process import Process
from tests.protocol.workers import MODEL, PAGE_TOKENS, Nothing, Worker
from tests.protocol.world import Bounds, Client, World

FAILOVER = FailoverBounds(
    max_attempts=4, failover_seconds=30, replacement_seconds=30, router_seconds=30
)
REQUEST_SECONDS = 600.0
# Workers tell the router of themselves this often, too, when nothing changes.
STATUS_SECONDS = 1.0


class StreamClient:
    """As `MultiplexClient`."""

    def __init__(self, address: str, *, peer_epoch: str) -> None:
        loop: Any = asyncio.get_running_loop()
        self._channel: Channel = loop.owner.network.channel(address)
        self._epoch = peer_epoch

    def call(self, _method: str, request: bytes, **_options: object) -> "StreamCall":
        return StreamCall(self._channel, GenerateRequest.FromString(request), self._epoch)

    async def close(self) -> None:
        await self._channel.close()


class StreamCall:
    """As `rpc.multiplex_client.Call`."""

    def __init__(self, channel: Channel, request: GenerateRequest, epoch: str) -> None:
        self._epoch = epoch
        self._parts: list[bytes] = []
        self._is_over = False
        self._error: EpserveError | None = None
        self._news = asyncio.Event()
        self._call: Call | None = None
        try:
            name = f"Generate {request.request_id}"
            self._call = channel.begin("Generate", name, request, self._feed)
        except grpc.aio.AioRpcError as error:
            self._feed(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._call is not None:
            self._call.leave()

    async def take(self) -> bytes:
        while not self._parts:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return b""
            self._news.clear()
            await self._news.wait()
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def _feed(self, word: object) -> None:
        if isinstance(word, GenerateResponse):
            self._parts.append(word.SerializeToString())
        else:
            self._is_over = True
            if isinstance(word, grpc.aio.AioRpcError):
                self._error = to_error(word, peer_epoch=self._epoch)
            else:
                assert word is Over
        self._news.set()


class Gateway(Process):
    """And the router beside it, as `Routers` to the gateway."""

    is_connected = True

    def __init__(self, network: Network, clock: ManualClock) -> None:
        super().__init__("gateway", network, clock)
        metrics: Any = Nothing()
        self.router = RouterCluster(_router_settings(), clock, metrics)
        self.channels = ChannelPool()
        self._service = RouterService(self.router, metrics, clock, metrics)
        self.cluster = Cluster(
            routers=self,  # type: ignore[arg-type]
            channels=self.channels,
            metrics=metrics,
            clock=clock,
            model=MODEL,
            vocab_size=1 << 16,
            eos_token_ids=(1,),
            bounds=FAILOVER,
        )

    async def assign(self, make_request: Any, **_options: object) -> bytes:
        context: Any = Context()
        reply = await self._service.Assign(make_request(), context)
        return reply.SerializeToString()

    def state(self) -> object:
        return super().state(), self.router.table, self.channels


class Failover(World):
    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._gateway = Gateway(self.network, self.clock)
        for worker in self.workers.values():
            self._tell(worker)

    def _can_begin(self) -> bool:
        return True

    def _others(self) -> list[Process]:
        return [self._gateway]

    def _begin(self) -> None:
        number = len(self.clients)
        client = self._new_client()
        call = GenerateCall(
            self._gateway.cluster,
            request_id=f"r{number}",
            prompt=Prompt(token_ids=pack_ids(client.prompt), max_tokens=client.max_tokens),
            sampling=SamplingParams(max_tokens=client.max_tokens),
            deadline=self.clock.now() + REQUEST_SECONDS,
        )
        loop = self._gateway.loop
        task = loop.create_task(self._read(client, call))
        client.leave = lambda: (task.cancel(), loop.run_ready())
        loop.run_ready()

    async def _read(self, client: Client, call: GenerateCall) -> None:
        try:
            async with aclosing(call.batches()) as batches:
                async for batch in batches:
                    client.take([token.token_id for token in batch.tokens])
            client.end("ok")
        except EpserveError as error:
            client.end(error.status.grpc)
        except asyncio.CancelledError:
            client.end("left")

    def _own_progress(self) -> Iterator[Choice]:
        """What the router has yet to hear of its workers."""
        known = {worker.address: worker for worker in self._gateway.router.table.workers}
        for worker in self.workers.values():
            seen = known[worker.address]
            if not worker.is_alive:
                if not seen.lost:
                    yield f"the router loses {worker.name}", lambda w=worker: self._lose(w)
            elif worker.is_frozen:
                if not seen.lost and worker.epoch == seen.epoch:
                    yield f"the router misses {worker.name}", lambda w=worker: self._lose(w)
            elif (
                seen.lost
                or seen.epoch != worker.epoch
                or (seen.state is WorkerState.DRAINING) != worker.front.draining
                or seen.status.num_accepted_total != worker.service.num_accepted_total
                or seen.load.num_requests != worker.service.load(0).num_open
            ):
                yield f"the router hears {worker.name}", lambda w=worker: self._hear(w)

    def _hear(self, worker: Worker) -> None:
        self._tell(worker)
        self._gateway.loop.run_ready()

    def _tell(self, worker: Worker) -> None:
        role = ROLE_DECODE if worker.address.startswith("decode") else ROLE_PREFILL
        ready = worker.front.ready[0]
        status = WorkerStatus(
            identity=ProcessIdentity(
                role=role, name=worker.name, epoch=worker.epoch, address=worker.address
            ),
            model=MODEL,
            kv_fingerprint="f",
            page_tokens=PAGE_TOKENS,
            max_model_len=ready.max_model_len,
            ready=True,
            draining=worker.front.draining,
            num_accepted_total=worker.service.num_accepted_total,
            pairing_version="1",
            ranks=[
                RankStatus(
                    max_running=ready.max_running,
                    num_running=worker.service.load(0).num_open,
                    pages_total=ready.pages_total,
                    pages_free=worker.pool.num_free,
                )
            ],
        )
        self._gateway.router.apply(StatusArrived(worker.address, role, status))

    def _next_second(self) -> float | None:
        second = super()._next_second()
        if second is None or not self._gateway.router.assigner.num_waiting:
            return second
        return min(second, self.clock.now() + STATUS_SECONDS)

    def _pass_time(self) -> None:
        super()._pass_time()
        for worker in self._running():
            self._hear(worker)

    def _lose(self, worker: Worker) -> None:
        self._gateway.router.apply(StreamBroken(worker.address, "it is gone"))
        self._gateway.loop.run_ready()

    def _check_clients(self) -> None:
        told = {client.name: client.outcome for client in self.clients}
        assert all(told.values()), f"somebody waits for ever: {told}"
        good = {"ok"}
        if "leaves" in self.spent:
            good.add("left")
        # Each costs a worker, or an attempt.
        num_losses = sum(kind not in ("leaves", "slow") for kind in self.spent)
        if num_losses >= min(self.bounds.num_workers, FAILOVER.max_attempts):
            good.add("UNAVAILABLE")
        assert set(told.values()) <= good, f"{told}"


def _router_settings() -> Any:
    return RouterSettings.model_construct()


@contextmanager
def stream_clients() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch("gateway.cluster.channels.MultiplexClient", StreamClient))
        yield
