"""The whole router behind its real sockets, with workers that do what the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.errors import (
    ContextLengthExceeded,
    EpserveError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from proto.router_pb2 import (
    AnnounceRequest,
    AssignRequest,
    AssignResponse,
    GetStatusRequest,
    GetStatusResponse,
)
from proto.router_pb2_grpc import AdminStub, RouterStub
from proto.worker_pb2 import ROLE_GATEWAY, ROLE_ROUTER, ProcessIdentity
from router.process import RouterProcess
from router.settings import RouterSettings
from router.table import StatusArrived, StreamBroken
from router.worker import Worker, WorkerState
from rpc.client import channel, to_error
from tests.router.fake_worker import FakeWorker

PATIENCE_SECONDS = 10.0


class RunningRouter:
    """A router in this event loop, and what is needed to wait for it instead of sleeping."""

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
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.cluster.assigner.num_waiting != number:
                await asyncio.sleep(0)

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


@pytest.fixture
async def prefill() -> AsyncIterator[FakeWorker]:
    async with FakeWorker("prefill", "p-1") as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[FakeWorker]:
    async with FakeWorker("decode", "d-1") as worker:
        yield worker


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., RunningRouter]]:
    running: list[RunningRouter] = []

    def begin(*, prefill: list[str], decode: list[str], **settings: Any) -> RunningRouter:  # noqa: ANN401 - fields of RouterSettings
        running.append(RunningRouter(prefill=tuple(prefill), decode=tuple(decode), **settings))
        return running[-1]

    yield begin
    for router in running:
        await router.close()


@pytest.fixture
async def router(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> RunningRouter:
    running = start(
        prefill=[prefill.address], decode=[decode.address], max_waiting=2, max_wait_seconds=30
    )
    await running.until_ready(prefill, decode)
    return running


async def test_a_pair_is_named_by_where_the_router_reaches_it(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    response = await router.assign()
    assert (response.prefill.address, response.prefill.epoch) == (prefill.address, "p-1")
    assert (response.decode.address, response.decode.epoch) == (decode.address, "d-1")
    assert response.queue_seconds < 1


async def test_without_workers_it_starts_and_says_unavailable(
    start: Callable[..., RunningRouter],
) -> None:
    error = await start(prefill=[], decode=[]).refusal()
    assert type(error) is Unavailable
    assert error.retry_after_seconds == 1


async def test_a_missing_role_is_named(
    prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    router = start(prefill=[prefill.address], decode=["127.0.0.1:9"])
    await router.until_ready(prefill)
    error = await router.refusal()
    assert type(error) is Unavailable
    assert "no decode worker is ready" in error.message


async def test_bad_requests(router: RunningRouter) -> None:
    assert type(await router.refusal(model="other")) is ModelNotFound
    assert type(await router.refusal(num_prompt_tokens=0)) is InvalidRequest
    assert type(await router.refusal(prefix_hashes=range(101))) is InvalidRequest
    assert type(await router.refusal(exclude_epochs=["x"] * 1000)) is InvalidRequest
    too_long = await router.refusal(num_prompt_tokens=4096)
    assert type(too_long) is ContextLengthExceeded
    assert "4095" in too_long.message
    await router.assign(num_prompt_tokens=4095)


async def test_a_full_cluster_makes_wait_until_a_worker_has_room(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4, accepted=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    calls = []
    for number in range(2):
        calls.append(router.call(request_id=str(number)))
        await router.until_waiting(number + 1)
    assert (await router.status()).num_waiting == 2
    await decode.say(num_running=3)
    first = await calls[0]
    assert first.queue_seconds > 0
    assert not calls[1].done()  # one place, one request; in order of arrival
    await decode.say(num_running=2)
    await calls[1]


async def test_own_assignments_count_until_the_worker_shows_them(
    router: RunningRouter, decode: FakeWorker
) -> None:
    for _ in range(4):
        await router.assign()
    fifth = router.call()
    await router.until_waiting(1)
    await decode.say(num_running=1, accepted=1)  # one arrived, three are on their way
    await router.until(lambda: len(router.seen(decode).pending) == 3)
    assert not fifth.done()
    await decode.say(num_running=3, accepted=4)
    await fifth


async def test_a_full_queue_refuses_at_once_with_a_delay(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    calls = [router.call() for _ in range(2)]
    await router.until_waiting(2)
    error = await router.refusal()
    assert type(error) is Overloaded
    assert error.retry_after_seconds is not None
    assert error.retry_after_seconds >= 1
    # A caller that goes away frees its place.
    calls[0].cancel()
    await router.until_waiting(1)
    third = router.call()
    await router.until_waiting(2)
    await decode.say(num_running=0)
    await asyncio.gather(calls[1], third)


async def test_the_wait_is_bounded(
    prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    async with FakeWorker("decode", "d-1", num_running=4) as decode:
        router = start(prefill=[prefill.address], decode=[decode.address], max_wait_seconds=0.05)
        await router.until_ready(prefill, decode)
        error = await router.refusal()
        assert type(error) is Overloaded
        assert "0.05 s" in error.message
        assert router.cluster.assigner.num_waiting == 0


async def test_a_passed_deadline_frees_the_place(router: RunningRouter, decode: FakeWorker) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    request = AssignRequest(model="demo", num_prompt_tokens=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Assign(request, timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.until_waiting(0)


async def test_a_dead_worker_gets_nothing_and_its_successor_is_another(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    waiting = router.call()
    await router.until_waiting(1)
    await decode.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert type(await router.refusal()) is Unavailable
    assert [status.identity.epoch for status in (await router.status()).workers] == ["p-1"]
    async with FakeWorker("decode", "d-2", listen=decode.address) as successor:
        await router.until_ready(successor)
        response = await router.assign()
        assert response.decode.epoch == "d-2"
        assert router.epochs() == {"p-1", "d-2"}


async def test_a_silent_worker_is_dead_until_it_speaks_again(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    router = start(prefill=[prefill.address], decode=[decode.address], silence_seconds=1.1)
    await router.until_ready(prefill, decode)
    decode.silent = True
    await router.until(lambda: router.in_state(WorkerState.LOST) == {decode.address})
    assert type(await router.refusal()) is Unavailable
    decode.silent = False
    await decode.say()
    await router.until_ready(decode)
    assert (await router.assign()).decode.epoch == "d-1"


async def test_failed_workers_are_left_out(
    router: RunningRouter, prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    error = await router.refusal(exclude_epochs=["d-1"])
    assert type(error) is Unavailable
    async with FakeWorker("decode", "d-2") as d2, FakeWorker("decode", "d-3") as d3:
        wider = start(prefill=[prefill.address], decode=[d2.address, d3.address])
        await wider.until_ready(prefill, d2, d3)
        for _ in range(3):
            assert (await wider.assign(exclude_epochs=["d-2"])).decode.epoch == "d-3"


async def test_a_draining_worker_gets_nothing_new(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(draining=True)
    await router.until(lambda: router.in_state(WorkerState.DRAINING) == {decode.address})
    assert type(await router.refusal()) is Unavailable
    await decode.say(draining=False)
    await router.until_ready(decode)
    await router.assign()


async def test_only_equal_fingerprints_are_paired_and_the_rest_is_told_why(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    async with (
        FakeWorker("decode", "d-other", fingerprint="f2", name="stranger") as stranger,
        FakeWorker("decode", "d-role") as misplaced,
        FakeWorker("prefill", "p-empty", page_tokens=0) as silly,
    ):
        router = start(
            prefill=[prefill.address, misplaced.address, silly.address],
            decode=[stranger.address, decode.address],
        )
        await router.until_ready(prefill, decode, stranger)
        await router.until(lambda: len(router.in_state(WorkerState.REFUSED)) == 2)
        for _ in range(4):
            assert (await router.assign()).decode.epoch == "d-1"
        reasons = {
            rejected.identity.epoch: rejected.reason
            for rejected in (await router.status()).rejected
        }
    assert set(reasons) == {"d-other", "d-role", "p-empty"}
    assert "'f2' (there 'f1')" in reasons["d-other"]
    assert "it is a decode worker, configured as prefill" in reasons["d-role"]
    assert "page_tokens" in reasons["p-empty"]


async def test_one_worker_behind_two_addresses_counts_once(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    twin = decode.address.replace("127.0.0.1", "localhost")
    router = start(prefill=[prefill.address], decode=[decode.address, twin])
    await router.until_ready(prefill)
    await router.until(lambda: len(router.in_state(WorkerState.REFUSED)) == 1)
    for _ in range(4):
        await router.assign()
    fifth = router.call()
    await router.until_waiting(1)
    fifth.cancel()


async def test_requests_with_a_common_prefix_go_to_the_same_worker(
    decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    await decode.say(max_running=100)
    async with FakeWorker("prefill", "p-a") as a, FakeWorker("prefill", "p-b") as b:
        router = start(prefill=[a.address, b.address], decode=[decode.address])
        await router.until_ready(a, b, decode)
        first = await router.assign(num_prompt_tokens=640, prefix_hashes=range(10))
        other = await router.assign(num_prompt_tokens=640, prefix_hashes=range(20, 30))
        assert {first.prefill.epoch, other.prefill.epoch} == {"p-a", "p-b"}
        # Both have taken in what they were given.
        await a.say(accepted=1)
        await b.say(accepted=1)
        await router.until(lambda: not router.seen(a).pending and not router.seen(b).pending)
        again = await router.assign(num_prompt_tokens=700, prefix_hashes=[*range(20, 30), 99])
        assert again.prefill.epoch == other.prefill.epoch


async def test_stopping_ends_waiting_calls_at_once(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    waiting = router.call()
    await router.until_waiting(1)
    router.stop.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(router.task, 2)


async def test_gateways_announce_themselves_and_learn_of_the_model(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    gateway = ProcessIdentity(
        role=ROLE_GATEWAY, name="gateway-0", address="127.0.0.1:8000", epoch="g-1", pid=7
    )
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert response.ready
    assert (response.model, response.page_tokens) == ("demo", 64)
    assert response.max_model_len == 4096
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Announce(AnnounceRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = await router.status()
    assert [process.role for process in status.processes] == [ROLE_ROUTER, ROLE_GATEWAY]
    assert status.processes[0].address == router.process.address
    assert status.processes[1] == gateway
    assert {worker.identity.address for worker in status.workers} == {
        prefill.address,
        decode.address,
    }
    await decode.say(ready=False)
    await router.until(lambda: router.in_state(WorkerState.LOADING) == {decode.address})
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert (response.ready, response.model) == (False, "demo")


async def test_nobody_to_announce_about(start: Callable[..., RunningRouter]) -> None:
    router = start(prefill=[], decode=[])
    gateway = ProcessIdentity(role=ROLE_GATEWAY, address="127.0.0.1:8000", epoch="g-1")
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert (response.ready, response.model, response.page_tokens) == (False, "", 0)


async def test_health_and_reflection(router: RunningRouter) -> None:
    for name in ("", "epserve.router.v1.Router", "epserve.router.v1.Admin"):
        reply = await router.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    (answer,) = [reply async for reply in router.reflection.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert {"epserve.router.v1.Router", "epserve.router.v1.Admin"} <= names


async def test_peers_that_are_no_workers_do_no_harm(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    """One that ends each stream, a web server, one that never answers, rubbish in protobuf's
    place, a name that does not exist, and a router instead of a worker."""
    await decode.say(max_running=100)

    mute_writers: list[asyncio.StreamWriter] = []

    async def web(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def mute(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mute_writers.append(writer)

    async def rubbish(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff\xff rubbish"

    handler = grpc.unary_stream_rpc_method_handler(rubbish)
    generic = grpc.method_handlers_generic_handler(
        "epserve.worker.v1.Worker", {"WatchStatus": handler}
    )
    rubbish_server = grpc.aio.server(handlers=[generic])
    rubbish_port = rubbish_server.add_insecure_port("127.0.0.1:0")
    await rubbish_server.start()
    web_server = await asyncio.start_server(web, "127.0.0.1", 0)
    mute_server = await asyncio.start_server(mute, "127.0.0.1", 0)
    other_router = start(prefill=[], decode=[])
    async with FakeWorker("decode", "d-end") as ending:
        ending.end_streams = True
        bad = [
            ending.address,
            *(f"127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (web_server, mute_server)),
            f"127.0.0.1:{rubbish_port}",
            "no.such.host.invalid:1",
            other_router.process.address,
        ]
        broken: set[str] = set()
        router = start(
            prefill=[prefill.address], decode=[*bad, decode.address], silence_seconds=1.1
        )
        observed = router.cluster.apply

        def note(event: StatusArrived | StreamBroken) -> None:
            if isinstance(event, StreamBroken):
                broken.add(event.address)
            observed(event)

        router.cluster.apply = note  # type: ignore[method-assign]
        await router.until_ready(prefill, decode)
        await router.until(lambda: broken == set(bad))
        assert (await router.assign()).decode.epoch == "d-1"
        assert router.epochs() == {"p-1", "d-1"}
        await router.close()
    for server in (web_server, mute_server):
        server.close()
        await server.wait_closed()
    for writer in mute_writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await rubbish_server.stop(None)
