"""A gRPC client of our own: gRPC's server must take it for any other, and it must bear any peer."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import hpack
import pytest
from h2.events import Event, PingAckReceived

from rpc import grpc_stream
from rpc.grpc_stream import GrpcStream
from rpc.options import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from tests.eventually import eventually

PATH = "/echo.Echo/Echo"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no peer that does not answer."""
    monkeypatch.setattr(grpc_stream, "CONNECT_SECONDS", 60.0)


class Heard:
    """Sends what it is given as room comes, and keeps what it is told."""

    def __init__(self, address: str, outgoing: list[bytes]) -> None:
        self.messages: list[bytes] = []
        self.ended: asyncio.Future[grpc.aio.AioRpcError | None]
        self.ended = asyncio.get_running_loop().create_future()
        self.outgoing = list(outgoing)
        self.stream = GrpcStream(address, PATH, self)

    def on_room(self) -> None:
        while self.outgoing and self.stream.has_room:
            self.stream.send(self.outgoing.pop(0))

    def on_message(self, content: bytes) -> None:
        self.messages.append(content)

    def on_end(self, error: grpc.aio.AioRpcError | None) -> None:
        self.ended.set_result(error)

    async def end(self) -> grpc.aio.AioRpcError:
        await self.stream.connect()
        error = await asyncio.wait_for(self.ended, 60)
        assert error is not None
        return error


Behaviour = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[str]:
    """gRPC's own server."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(behaviour)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("echo.Echo", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def speaking(*content: bytes, ends: bool = False) -> AsyncIterator[str]:
    """A peer that says this, whatever it hears."""
    done = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in content:
            writer.write(part)
            await writer.drain()
        if not ends:
            await done.wait()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        done.set()
        server.close()


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request
        if request == b"last":
            return


async def test_a_host_that_can_have_no_name_is_no_peer() -> None:
    error = await Heard("a..b:1", []).end()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "cannot connect to a..b:1" in (error.details() or "")


async def test_messages_of_all_sizes_go_both_ways() -> None:
    source = random.Random(1)
    sizes = [0, 1, 16378, 16379, 16380, 65_530, 65_536, 3 * 2**20, 18 * 2**20, 5, 0, 7]
    messages = [source.randbytes(size) for size in sizes] + [b"x"] * 500 + [b"last"]
    async with serving(echo) as address:
        heard = Heard(address, messages)
        await heard.stream.connect()
        assert await asyncio.wait_for(heard.ended, 60) is None
        assert heard.messages == messages


async def test_a_server_that_reads_late_gets_everything() -> None:
    go = asyncio.Event()

    async def late(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await go.wait()
        async for message in echo(requests, context):
            yield message

    messages = [bytes([number % 251]) * 2**20 for number in range(24)] + [b"last"]
    async with serving(late) as address:
        heard = Heard(address, messages)
        await heard.stream.connect()
        assert not heard.stream.has_room  # the windows are full
        assert heard.outgoing
        go.set()
        assert await asyncio.wait_for(heard.ended, 60) is None
        assert heard.messages == messages


async def refusing(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    trailers = (("error-code", "full"), ("details-bin", b"\x00\xff\x01"))
    if await anext(aiter(requests)) == b"talks":
        yield b"before"
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "50 % of the größten", trailers)


@pytest.mark.parametrize("first", [b"talks", b"is silent"])
async def test_errors_are_those_that_grpcs_own_client_sees(first: bytes) -> None:
    async with serving(refusing) as address:
        error = await Heard(address, [first]).end()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(PATH)(iter([first]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
    expected = caught.value
    assert (error.code(), error.details()) == (expected.code(), expected.details())
    wanted = dict(expected.trailing_metadata() or ())
    assert wanted
    assert wanted.items() <= dict(error.trailing_metadata() or ()).items()


async def test_a_method_that_is_not_there_and_a_server_that_stops() -> None:
    async with serving(echo) as address:
        heard = Heard(address, [])
        heard.stream._path = "/echo.Echo/Nothing"
        assert (await heard.end()).code() is grpc.StatusCode.UNIMPLEMENTED
        heard = Heard(address, [b"a"])
        await heard.stream.connect()
        await eventually(lambda: heard.messages)
    assert await asyncio.wait_for(heard.ended, 60) is not None
    error = await Heard(address, []).end()  # nobody listens there any more
    assert error.code() is grpc.StatusCode.UNAVAILABLE


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    5,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS, PADDED = 1, 4, 8


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """As RFC 9113 has it; the library under test would not write the wrong ones."""
    head = len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + content


def block(*headers: tuple[str, str]) -> bytes:
    return hpack.Encoder().encode(headers)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


HELLO = frame(SETTINGS, 0, 0, b"")
GOOD = block((":status", "200"), ("content-type", "application/grpc"))
HEAD = frame(HEADERS, END_HEADERS, 1, GOOD)
END = END_HEADERS | END_STREAM
BAD_STATUS = block((":status", "200"), ("grpc-status", "x"))
LARGE = MAX_MESSAGE_BYTES + 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (HELLO + frame(HEADERS, END, 1, b"\xff\xff\xff"), "UNAVAILABLE"),
        (HELLO + frame(CONTINUATION, END, 1, GOOD), "UNAVAILABLE"),
        (HELLO + frame(HEADERS, 0, 1, GOOD) + HELLO, "UNAVAILABLE"),
        (HELLO + frame(DATA, PADDED, 1, b"\x09ab"), "UNAVAILABLE"),
        (HELLO + HEAD + frame(DATA, 0, 3, b"ab"), "UNAVAILABLE"),
        (HELLO + HEAD + frame(DATA, 0, 1, b"\1\0\0\0\0"), "UNAVAILABLE"),
        (HELLO + HEAD + frame(0, 0, 1, b"\0" + LARGE.to_bytes(4, "big")), "UNAVAILABLE"),
        (HELLO + HEAD + frame(DATA, END_STREAM, 1, b""), "INTERNAL"),
        (HELLO + frame(SETTINGS, 0, 0, b"abc"), "UNAVAILABLE"),
        (setting(4, 2**31), "UNAVAILABLE"),
        (setting(5, 1), "UNAVAILABLE"),
        (HELLO + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), "UNAVAILABLE"),
        (HELLO + frame(GOAWAY, 0, 0, b"\0" * 8), "UNAVAILABLE"),
        (HELLO + frame(RST_STREAM, 0, 1, b"\0\0\0\7"), "UNAVAILABLE"),
        (HELLO + frame(RST_STREAM, 0, 1, b"\0\0\0\x08"), "CANCELLED"),
        (HELLO + frame(RST_STREAM, 0, 1, b"\0\0\0\2"), "INTERNAL"),
        (
            HELLO + frame(HEADERS, END, 1, block((":status", "503"))),
            "UNAVAILABLE",
        ),
        (
            HELLO + frame(HEADERS, END, 1, BAD_STATUS),
            "UNKNOWN",
        ),
    ],
)  # fmt: skip
async def test_what_is_said_wrongly_ends_the_stream(said: bytes, code: str) -> None:
    async with speaking(said) as address:
        heard = Heard(address, [b"hello"])
        assert (await heard.end()).code().name == code
        assert not heard.messages
        assert not heard.stream.has_room


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", HELLO + b"\xff" * 4000]
)
async def test_a_frame_that_never_ends_is_given_up(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream, "TICK_SECONDS", 0.02)
    async with speaking(said) as address:
        assert (await Heard(address, [b"hello"]).end()).code() is grpc.StatusCode.UNAVAILABLE


async def test_headers_in_parts_padding_and_messages_in_parts_are_understood() -> None:
    trailers = block(("x-long", "y" * 300), ("grpc-status", "0"))
    said = (
        HELLO
        + HEAD
        + frame(DATA, PADDED, 1, b"\x03" + b"\0\0\0" + b"...")
        + frame(DATA, 0, 1, b"\0\2a")
        + frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + b"\0" * 4)
        + frame(0xF, 0, 9, b"of a kind that is not known")
        + frame(DATA, 0, 1, b"b\0\0\0\0\0")
        + frame(HEADERS, END_STREAM, 1, trailers[:100])
        + frame(CONTINUATION, END_HEADERS, 1, trailers[100:])
    )
    async with speaking(*(said[at : at + 5] for at in range(0, len(said), 5))) as address:
        heard = Heard(address, [])
        await heard.stream.connect()
        assert await asyncio.wait_for(heard.ended, 60) is None
        assert heard.messages == [b"ab", b""]


@pytest.mark.parametrize("outgoing", [[], [b"x" * 2**20]])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (frame(HEADERS, END, 1, block(("grpc-status", "0"))), None),
        (frame(RST_STREAM, 0, 1, b"\0\0\0\x08"), "CANCELLED"),
    ],
)
async def test_an_end_that_comes_with_what_is_in_front_of_it(
    monkeypatch: pytest.MonkeyPatch, outgoing: list[bytes], end: bytes, code: str | None
) -> None:
    monkeypatch.setattr(grpc_stream, "WINDOW_BYTES", 2**16)
    half = bytes(2**15 - 1000)
    said = (
        HELLO
        + HEAD
        + frame(DATA, 0, 1, b"\0" + (2 * len(half)).to_bytes(4, "big"))
        + frame(WINDOW_UPDATE, 0, 1, b"\0\1\0\0")
        + b"".join(frame(DATA, 0, 1, half[at : at + 8000]) for at in range(0, len(half), 8000)) * 2
        + frame(WINDOW_UPDATE, 0, 0, b"\0\1\0\0")
        + end
    )
    async with speaking(said) as address:
        heard = Heard(address, outgoing)
        await heard.stream.connect()
        error = await asyncio.wait_for(heard.ended, 60)
        assert (error and error.code().name) == code
        assert [len(message) for message in heard.messages] == [2 * len(half)]


async def test_a_peer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "CONNECT_SECONDS", 0.2)
    async with speaking() as address:
        error = await Heard(address, []).end()
        assert "no answer" in (error.details() or "")
    monkeypatch.setattr(grpc_stream, "CONNECT_SECONDS", 60.0)
    monkeypatch.setattr(grpc_stream, "TICK_SECONDS", 0.01)
    async with speaking(HELLO) as address:  # and then never again
        error = await Heard(address, []).end()
        assert "does not answer" in (error.details() or "")
    monkeypatch.setattr(grpc_stream, "TICK_SECONDS", 20.0)
    async with speaking(HELLO, ends=True) as address:
        assert "is lost" in ((await Heard(address, []).end()).details() or "")


async def test_a_peer_that_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(grpc_stream, "GONE_AFTER_TICKS", 1000)
    pings: list[bytes] = []
    original = GrpcStream._accept

    def accept(stream: GrpcStream, event: Event) -> None:
        if isinstance(event, PingAckReceived):
            pings.append(event.ping_data)
        original(stream, event)

    monkeypatch.setattr(GrpcStream, "_accept", accept)
    async with serving(echo) as address:
        heard = Heard(address, [])
        await heard.stream.connect()
        await eventually(lambda: len(pings) >= 3, 60)
        assert not heard.ended.done()
        heard.stream.close()
        assert set(pings) == {b"epserve."}


async def test_a_user_that_fails_ends_its_stream() -> None:
    async with serving(echo) as address:
        heard = Heard(address, [b"x"])
        heard.on_message = lambda content: 1 / 0  # type: ignore[method-assign, assignment]
        assert (await heard.end()).code() is grpc.StatusCode.INTERNAL
