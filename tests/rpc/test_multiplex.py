"""Many calls over one stream: each must end as if it had come alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    Unavailable,
)
from core.log import REQUEST_ID
from core.token_ids import pack_ids, unpack_ids
from proto import generate_pb2, generate_pb2_grpc
from proto.generate_pb2 import GenerateRequest, GenerateResponse, Token
from proto.multiplex_pb2 import ClientFrame, OpenCall
from proto.multiplex_pb2_grpc import MultiplexStub
from rpc.client import remaining_seconds
from rpc.multiplex_client import Call, MultiplexClient
from rpc.server import RpcServer
from tests.eventually import eventually

GENERATE = "/epserve.generate.v1.Decode/Generate"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Counting(generate_pb2_grpc.DecodeServicer):
    """Sends the prompt's tokens one a message, then fails as the model's name says."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    num_sent: int = 0
    request_ids: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        self.num_running += 1
        self.request_ids[request.request_id] = REQUEST_ID.get()
        self.seconds = remaining_seconds(context)
        try:
            for token_id in unpack_ids(request.prompt_token_ids):
                self.num_sent += 1
                if self.num_sent % 50 == 0:
                    await asyncio.sleep(0.005)
                yield GenerateResponse(tokens=[Token(token_id=token_id)])
            if request.model == "hang":
                await self.gate.wait()
            elif request.model in ERRORS:
                raise ERRORS[request.model]
        finally:
            self.num_running -= 1


ERRORS = {
    "full": Overloaded("no room", retry_after_seconds=2.5),
    "bad": InvalidRequest("no such token", param="prompt"),
    "gone": Unavailable("peer died", failed_epoch="epoch-7"),
    "other": Mismatch("another one", failed_epoch="epoch-8"),
    "broken": RuntimeError("a secret of the server"),
}


@dataclass
class Served:
    server: RpcServer
    servicer: Counting
    client: MultiplexClient

    def call(self, tokens: int, model: str = "", **options: Any) -> Call:
        request = GenerateRequest(
            request_id=options.pop("name", "x"),
            model=model,
            prompt_token_ids=pack_ids(range(tokens)),
        )
        options.setdefault("timeout_seconds", 20)
        return self.client.call(GENERATE, request.SerializeToString(), **options)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    server, servicer = RpcServer("127.0.0.1:0"), Counting()
    server.add(
        generate_pb2_grpc.add_DecodeServicer_to_server, servicer, generate_pb2, "Decode"
    )  # fmt: skip
    await server.start()
    client = MultiplexClient(server.address, peer_epoch="epoch-0", **options)
    try:
        yield Served(server, servicer, client)
    finally:
        await client.close()
        await server.stop(0)


async def tokens_of(call: Call) -> list[int]:
    tokens: list[int] = []
    with call:
        while content := await call.take():
            tokens += [token.token_id for token in GenerateResponse.FromString(content).tokens]
    return tokens


async def test_every_token_once_and_in_order() -> None:
    async with serving() as served:
        lengths = [0, 1, 2, 500, 7] * 20
        results = await asyncio.gather(*(tokens_of(served.call(length)) for length in lengths))
        assert results == [list(range(length)) for length in lengths]
        assert served.server.num_running_calls == 0


async def test_a_call_that_is_behind_gets_everything_at_once() -> None:
    async with serving() as served:
        with served.call(300, "hang") as call:

            def waiting() -> list[int]:
                response = GenerateResponse.FromString(b"".join(call._parts))
                return [token.token_id for token in response.tokens]

            await eventually(lambda: len(waiting()) == 300)
            response = GenerateResponse.FromString(await call.take())
            assert [token.token_id for token in response.tokens] == list(range(300))


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "broken"])
async def test_errors_are_those_of_a_call_of_its_own(name: str) -> None:
    async with serving() as served:
        meant: Any = ERRORS[name]
        with pytest.raises(type(meant)) as raised:
            await tokens_of(served.call(3, name))
        for detail in ("message", "param", "retry_after_seconds", "failed_epoch"):
            assert getattr(raised.value, detail) == getattr(meant, detail)
        assert meant.__cause__ is None  # as its own it would be kept, with all frames on its way


async def test_defects_are_not_told() -> None:
    async with serving() as served:
        with pytest.raises(InternalError) as raised:
            await tokens_of(served.call(3, "broken"))
        assert "secret" not in raised.value.message
        with pytest.raises(InvalidRequest, match="no method"):
            await tokens_of(served.client.call("/x.Y/Z", b"", timeout_seconds=5))
        with pytest.raises(InvalidRequest, match="no message"):
            await tokens_of(served.client.call(GENERATE, b"\xff\xff", timeout_seconds=5))
        assert await tokens_of(served.call(2)) == [0, 1]


async def test_leaving_ends_the_call_on_the_server() -> None:
    async with serving() as served:
        with served.call(1, "hang") as call, served.call(1, "hang") as other:
            assert await call.take()
            assert await other.take()
            assert served.servicer.num_running == 2
            call.__exit__(None, None, None)
            await eventually(lambda: served.servicer.num_running == 1)
        await eventually(lambda: served.server.num_running_calls == 0)


async def test_a_call_left_before_its_frame_is_never_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpc.multiplex_client.FRAME_BYTES", 1)  # one call a frame
    async with serving() as served:
        with served.call(1, "hang", name="first") as first:
            left = served.call(1, "hang", name="left")
            left.__exit__(None, None, None)
            assert await first.take()
            await tokens_of(served.call(1, name="behind"))
            assert set(served.servicer.request_ids) == {"first", "behind"}


async def test_deadlines_and_ids_are_passed_on() -> None:
    async with serving() as served:
        with pytest.raises(DeadlineExceeded):
            await tokens_of(served.call(1, "hang", timeout_seconds=0.3))
        await eventually(lambda: served.servicer.num_running == 0)
        await tokens_of(served.call(1, timeout_seconds=500))
        assert served.servicer.seconds is not None
        assert 400 < served.servicer.seconds <= 500
        await asyncio.gather(
            *(tokens_of(served.call(1, name=f"r{n}", request_id=f"id-{n}")) for n in range(9))
        )
        expected = {f"r{n}": f"id-{n}" for n in range(9)}
        assert served.servicer.request_ids.items() >= expected.items()


async def test_a_reader_far_behind_loses_its_call_only() -> None:
    async with serving(max_waiting_bytes=100) as served:
        slow = served.call(100_000, "hang")
        await eventually(lambda: served.servicer.num_sent > 0)
        await eventually(lambda: served.servicer.num_running == 0)
        assert served.servicer.num_sent < 100_000
        assert await tokens_of(served.call(3)) == [0, 1, 2]
        with pytest.raises(DeadlineExceeded, match="not read"):
            await tokens_of(slow)


async def test_requests_that_begin_together_are_spread_over_frames() -> None:
    """In one message they would be more than gRPC takes."""
    async with serving() as served:
        request = GenerateRequest(prompt_token_ids=pack_ids([1]), model="x" * 5 * 2**20)
        content = request.SerializeToString()
        calls = [served.client.call(GENERATE, content, timeout_seconds=20) for _ in range(16)]
        assert await asyncio.gather(*map(tokens_of, calls)) == [[1]] * 16


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n\r\n", bytes(range(256))])
async def test_who_speaks_something_else_is_a_lost_server(said: bytes) -> None:
    """The same of one that accepts connections and never says a word, and of no one at all."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        if not said:
            await reader.read()  # until the client gives up
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as peer:
        port = peer.sockets[0].getsockname()[1]
        for address in (f"127.0.0.1:{port}", "a..b:1"):
            client = MultiplexClient(address, peer_epoch="epoch-0")
            began = asyncio.get_running_loop().time()
            with (
                client.call(GENERATE, b"", timeout_seconds=20) as call,
                pytest.raises(Unavailable) as raised,
            ):
                await call.take()
            assert raised.value.failed_epoch == "epoch-0"
            assert asyncio.get_running_loop().time() - began < 10
            await client.close()


async def test_what_is_no_frame_ends_the_session_on_both_sides() -> None:
    ended = asyncio.Event()

    async def session(frames: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async for _ in frames:
                yield b"no frame"
        finally:
            ended.set()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(session)
    handlers = {"Session": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("epserve.rpc.v1.Multiplex", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = MultiplexClient(f"127.0.0.1:{port}", peer_epoch="epoch-0")
    with client.call(GENERATE, b"", timeout_seconds=20) as call:
        with pytest.raises(Unavailable) as raised:
            await call.take()
        assert raised.value.failed_epoch == "epoch-0"
    await asyncio.wait_for(ended.wait(), 5)
    await client.close()
    await server.stop(0)


async def test_a_lost_server_is_named_and_found_again() -> None:
    async with serving() as served:
        address = served.server.address
        with served.call(1, "hang") as call:
            assert await call.take()
            await served.server.stop(0)
            with pytest.raises(Unavailable) as raised:
                await call.take()
            assert raised.value.failed_epoch == "epoch-0"
        with pytest.raises(Unavailable):
            await tokens_of(served.call(1))
        served.server = RpcServer(address)
        served.server.add(
            generate_pb2_grpc.add_DecodeServicer_to_server, Counting(), generate_pb2, "Decode"
        )
        await served.server.start()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await tokens_of(served.call(2)) == [0, 1]
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        await served.server.stop(0)


async def test_a_graceful_stop_lets_calls_finish_and_takes_no_new_ones() -> None:
    async with serving() as served:
        with served.call(1, "hang") as call:
            assert await call.take()
            stopping = asyncio.create_task(served.server.stop(30))
            await asyncio.wait_for(served.server.stopping.wait(), 20)

            async def is_refused() -> bool:
                try:
                    await tokens_of(served.call(1))
                except Unavailable:
                    return True
                return False

            await eventually(is_refused)
            served.servicer.gate.set()
            assert await call.take() == b""
        await asyncio.wait_for(stopping, 20)  # the session that stays open does not hold it


async def test_a_broken_session_leaves_no_task_behind() -> None:
    async with serving() as served:
        call = served.call(1, "hang")
        assert await call.take()
        session = served.client._session
        assert session is not None
        await served.server._server.stop(None)
        with pytest.raises(Unavailable):
            await call.take()

        def sends() -> bool:
            names = [getattr(t.get_coro(), "__name__", "") for t in asyncio.all_tasks()]
            return "_consume_request_iterator" in names

        await eventually(lambda: not sends())
        await session.close()


async def test_a_lost_client_ends_its_calls() -> None:
    async with serving() as served:
        client = MultiplexClient(served.server.address)
        request = GenerateRequest(model="hang", prompt_token_ids=pack_ids([1])).SerializeToString()
        call = client.call(GENERATE, request, timeout_seconds=20)
        assert await call.take()
        await client.close()
        await eventually(lambda: served.servicer.num_running == 0)
        with pytest.raises(Unavailable):
            await call.take()
        assert not served.client.call(GENERATE, request, timeout_seconds=20).__exit__(
            None, None, None
        )


def opening(call: int) -> OpenCall:
    """Of a call that does not end by itself."""
    request = GenerateRequest(model="hang", prompt_token_ids=pack_ids([1])).SerializeToString()
    return OpenCall(call=call, method=GENERATE, request=request, timeout_seconds=60)


async def test_a_call_that_is_opened_and_cancelled_at_once_is_over() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        frame = ClientFrame(open=[opening(1)], cancel=[1])
        async with asyncio.timeout(10):
            async for _ in MultiplexStub(channel).Session(iter([frame])):
                pass
        assert served.servicer.num_running == 0


async def test_a_call_opened_twice_ends_its_session() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        session = MultiplexStub(channel).Session()
        await session.write(ClientFrame(open=[opening(1), opening(2), opening(1)]))
        async with asyncio.timeout(10):
            async for _ in session:
                pass
        await eventually(lambda: served.server.num_running_calls == 0, seconds=10)
        assert served.servicer.num_running == 0


async def test_ends_of_requests_are_logged() -> None:
    async with serving() as served:
        with capture_logs() as lines:
            await tokens_of(served.call(1, request_id="id-good"))
            with pytest.raises(Overloaded):
                await tokens_of(served.call(1, "full", request_id="id-full"))
            await tokens_of(served.call(1, request_id=""))  # of no request: not worth a line
            # The client may hear of an end before there is a line of it.
            await eventually(lambda: served.server.num_running_calls == 0)
    ends = [line for line in lines if line["event"] == "call ended"]
    assert [line["code"] for line in ends] == ["OK", "RESOURCE_EXHAUSTED"]
    assert {line["method"] for line in ends} == {GENERATE}
