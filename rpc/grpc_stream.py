"""One gRPC stream in both directions, on an HTTP/2 connection of its own in the event loop.

    stream = GrpcStream("host:port", "/epserve.rpc.v1.Multiplex/Session", user)
    await stream.connect()                  # user.on_room(), on_message(bytes), ..., on_end(error)

To the server it is a gRPC client as any other. To this process it costs a tenth: the library
hands each message through a poller's thread, a queue, another thread and a pipe, all of which
want the core that the event loop runs on.

Not here: TLS, compression, a second stream.
"""

import asyncio
import base64
import binascii
import struct
from typing import Any, Protocol, cast
from urllib.parse import unquote

import grpc
import hpack

from core.address import parse_address
from core.log import get_logger
from rpc import http2
from rpc.http2 import Frame, FrameError
from rpc.options import (
    KEEPALIVE_MILLISECONDS,
    KEEPALIVE_TIMEOUT_MILLISECONDS,
    MAX_MESSAGE_BYTES,
)

log = get_logger("rpc.grpc_stream")

STREAM = 1
# From the name of the peer to its first frame.
CONNECT_SECONDS = 2.0
# What the peer may send before it is told that it was read.
WINDOW_BYTES = 16 * 2**20
TICK_SECONDS = 0.5
PING_AFTER_TICKS = round(KEEPALIVE_MILLISECONDS / 1000 / TICK_SECONDS)
GONE_AFTER_TICKS = PING_AFTER_TICKS + round(KEEPALIVE_TIMEOUT_MILLISECONDS / 1000 / TICK_SECONDS)
PING_FRAME = http2.frame(http2.PING, 0, 0, b"epserve.")

_PREFIX = struct.Struct(">BI")  # of a message: compressed or not, bytes
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# What an HTTP/2 error means to a call (gRPC's PROTOCOL-HTTP2); of all others INTERNAL.
_CODE_OF_RESET = {
    0x7: grpc.StatusCode.UNAVAILABLE,  # refused
    0x8: grpc.StatusCode.CANCELLED,
    0xB: grpc.StatusCode.RESOURCE_EXHAUSTED,  # "enhance your calm"
    0xC: grpc.StatusCode.PERMISSION_DENIED,
}


class StreamUser(Protocol):
    """Called from the event loop."""

    def on_room(self) -> None:
        """Connected, or what was sent is on its way: there may be more."""
        ...

    def on_message(self, content: bytes) -> None:
        """One message of the server; what this raises ends the stream."""
        ...

    def on_end(self, error: "grpc.aio.AioRpcError | None") -> None:
        """Called once, as the last; None when the server ended it well."""
        ...


class GrpcStream(asyncio.Protocol):
    """To the server at `address`; call `connect` at once."""

    def __init__(self, address: str, path: str, user: StreamUser) -> None:
        """Raises ValueError when `address` is not host:port."""
        self._address = parse_address(address)
        self._path = path
        self._user = user
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._is_over = False
        self._num_silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        # out
        self._unsent = b""
        self._is_writable = False
        self._stream_window = self._window = self._initial_window = http2.DEFAULT_WINDOW_BYTES
        self._frame_bytes = http2.DEFAULT_FRAME_BYTES
        # in
        self._frames = http2.FrameReader()
        self._headers = hpack.Decoder()
        self._header_parts: list[bytes] = []
        self._ends_with_headers = False
        self._body = bytearray()
        self._num_unreported = 0

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent now; else `on_room` will tell."""
        return self._is_writable and not self._unsent and not self._is_over

    async def connect(self) -> None:
        """Returns once the server speaks HTTP/2, or the stream has ended."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._loop.create_connection(lambda: self, *self._address)
                await self._greeted
        except (OSError, TimeoutError) as error:
            text = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
            self._break(f"cannot connect to {self._address}: {text}")

    def send(self, content: bytes) -> None:
        """One message; only while there is room."""
        assert self.has_room
        self._unsent = _PREFIX.pack(0, len(content)) + content
        self._push()

    def close(self) -> None:
        """Nothing is sent or told any more."""
        self._finish()

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self._transport.abort()
            return
        self._is_writable = True
        self._transport.write(
            http2.PREFACE
            + http2.settings(
                (
                    (http2.SETTINGS_ENABLE_PUSH, 0),
                    (http2.SETTINGS_INITIAL_WINDOW_SIZE, WINDOW_BYTES),
                )
            )
            + http2.window_update(0, WINDOW_BYTES - http2.DEFAULT_WINDOW_BYTES)
            + http2.frame(http2.HEADERS, http2.END_HEADERS, STREAM, self._request_headers())
        )
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._user.on_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._break(f"the connection to {self._address} is lost")

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._push()
        self._tell_room()

    def data_received(self, data: bytes) -> None:
        self._num_silent_ticks = 0
        try:
            for one in self._frames.feed(data):
                if self._is_over:
                    return
                self._accept(one)
        except (FrameError, hpack.HPACKError, UnicodeDecodeError) as error:
            self._break(f"{self._address} does not speak HTTP/2 as agreed: {error}")
        except Exception:
            log.exception("stream ended by an unexpected exception")
            self._end_with(grpc.StatusCode.INTERNAL, "internal error")

    def _tick(self) -> None:
        """A peer whose machine vanished says nothing, not even to a ping."""
        self._num_silent_ticks += 1
        if self._num_silent_ticks >= GONE_AFTER_TICKS:
            self._break(f"{self._address} does not answer")
            return
        if self._num_silent_ticks == PING_AFTER_TICKS and self._transport is not None:
            self._transport.write(PING_FRAME)
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    # ---- out

    def _request_headers(self) -> bytes:
        return http2.header_block(
            (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", self._path.encode()),
                (b":authority", str(self._address).encode()),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
                (b"grpc-accept-encoding", b"identity"),
                (b"user-agent", b"epserve"),
            )
        )

    def _push(self) -> None:
        """Sends as much as the peer, and the transport, take."""
        unsent, position = self._unsent, 0
        while position < len(unsent) and self._is_writable:
            room = min(self._window, self._stream_window, self._frame_bytes)
            if room <= 0:
                break
            part = unsent[position : position + room]
            position += len(part)
            self._window -= len(part)
            self._stream_window -= len(part)
            assert self._transport is not None
            self._transport.write(http2.frame(http2.DATA, 0, STREAM, part))
        self._unsent = unsent[position:]

    def _tell_room(self) -> None:
        if self.has_room:
            self._user.on_room()

    # ---- in

    def _accept(self, one: Frame) -> None:
        if self._header_parts and one.kind != http2.CONTINUATION:
            raise FrameError("headers that are interrupted")
        if one.kind == http2.DATA:
            self._accept_data(one)
        elif one.kind in (http2.HEADERS, http2.CONTINUATION):
            self._accept_headers(one)
        elif one.kind == http2.SETTINGS:
            if not one.flags & http2.ACK:
                self._accept_settings(one.payload)
        elif one.kind == http2.WINDOW_UPDATE:
            self._accept_window(one)
        elif one.kind == http2.PING:
            if not one.flags & http2.ACK:
                self._write(http2.frame(http2.PING, http2.ACK, 0, one.payload))
        elif one.kind == http2.GOAWAY:
            # A stream that it has taken goes on.
            if http2.read_number(one.payload) < STREAM:
                self._break(f"{self._address} takes no more calls")
        elif one.kind == http2.RST_STREAM and one.stream == STREAM:
            number = int.from_bytes(one.payload, "big")
            code = _CODE_OF_RESET.get(number, grpc.StatusCode.INTERNAL)
            self._end_with(code, f"{self._address} reset the stream ({number})")
        elif one.kind == http2.PUSH_PROMISE:
            raise FrameError("a push")

    def _accept_settings(self, payload: bytes) -> None:
        for name, value in http2.read_settings(payload):
            if name == http2.SETTINGS_INITIAL_WINDOW_SIZE:
                if value > http2.MAX_WINDOW_BYTES:
                    raise FrameError("a window that is too large")
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == http2.SETTINGS_MAX_FRAME_SIZE:
                if not http2.DEFAULT_FRAME_BYTES <= value <= http2.MAX_FRAME_BYTES:
                    raise FrameError("a frame size that cannot be")
                self._frame_bytes = value
        self._write(http2.frame(http2.SETTINGS, http2.ACK, 0, b""))
        if not self._greeted.done():
            self._greeted.set_result(None)
        self._push()
        self._tell_room()

    def _accept_window(self, one: Frame) -> None:
        num_bytes = http2.read_number(one.payload)
        if one.stream == STREAM:
            self._stream_window += num_bytes
        elif one.stream == 0:
            self._window += num_bytes
        if self._unsent:
            self._push()
            self._tell_room()

    def _accept_data(self, one: Frame) -> None:
        if one.stream != STREAM:
            raise FrameError("data of a stream that is not there")
        self._num_unreported += len(one.payload)
        if self._num_unreported > WINDOW_BYTES // 2:
            num_bytes, self._num_unreported = self._num_unreported, 0
            self._write(
                http2.window_update(0, num_bytes) + http2.window_update(STREAM, num_bytes)
            )
        self._body += http2.without_padding(one)
        self._read_messages()
        if one.flags & http2.END_STREAM and not self._is_over:
            self._end_with(grpc.StatusCode.INTERNAL, "the stream ended without a status")

    def _read_messages(self) -> None:
        body, position = self._body, 0
        while len(body) - position >= _PREFIX.size and not self._is_over:
            compressed, num_bytes = _PREFIX.unpack_from(body, position)
            if compressed or num_bytes > MAX_MESSAGE_BYTES:
                raise FrameError("a message that is compressed, or too large")
            begin = position + _PREFIX.size
            if len(body) < begin + num_bytes:
                break
            position = begin + num_bytes
            self._user.on_message(bytes(body[begin:position]))
        del body[:position]

    def _accept_headers(self, one: Frame) -> None:
        if one.stream != STREAM or (one.kind == http2.CONTINUATION and not self._header_parts):
            raise FrameError("headers of a stream that is not there")
        if one.kind == http2.HEADERS:
            self._ends_with_headers = bool(one.flags & http2.END_STREAM)
        self._header_parts.append(
            http2.without_padding(one) if one.kind == http2.HEADERS else one.payload
        )
        if sum(map(len, self._header_parts)) > http2.DEFAULT_WINDOW_BYTES:
            raise FrameError("headers that are too large")
        if not one.flags & http2.END_HEADERS:
            return
        block, self._header_parts = b"".join(self._header_parts), []
        headers: dict[str, str] = {str(name): str(value) for name, value in self._decode(block)}
        status = headers.get(":status", "200")
        if status != "200" and "grpc-status" not in headers:
            self._break(f"{self._address} answers with HTTP status {status}")
        elif self._ends_with_headers:
            self._end_as(headers)

    def _decode(self, block: bytes) -> Any:  # noqa: ANN401 - the library's tuples of str
        return self._headers.decode(block)

    # ---- the end

    def _end_as(self, trailers: dict[str, str]) -> None:
        number = trailers.pop("grpc-status", "")
        code = _CODES.get(int(number)) if number.isascii() and number.isdigit() else None
        if code is grpc.StatusCode.OK:
            self._finish()
            self._user.on_end(None)
            return
        message = unquote(trailers.pop("grpc-message", ""))
        self._end_with(code or grpc.StatusCode.UNKNOWN, message, trailers)

    def _break(self, message: str) -> None:
        self._end_with(grpc.StatusCode.UNAVAILABLE, message)

    def _end_with(
        self, code: grpc.StatusCode, message: str, trailers: dict[str, str] | None = None
    ) -> None:
        if self._is_over:
            return
        self._finish()
        told = grpc.aio.Metadata(
            *((name, _value(name, value)) for name, value in (trailers or {}).items())
        )
        self._user.on_end(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), told, message, None))

    def _finish(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if not self._greeted.done():
            self._greeted.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def _write(self, content: bytes) -> None:
        assert self._transport is not None
        self._transport.write(content)


def _value(name: str, value: str) -> str | bytes:
    """gRPC's binary headers come in base64."""
    if not name.endswith("-bin"):
        return value
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4))
    except binascii.Error:
        return b""
