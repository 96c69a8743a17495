"""One gRPC stream in both directions, on an HTTP/2 connection of its own in the event loop.

    stream = GrpcStream("host:port", "/epserve.rpc.v1.Multiplex/Session", user)
    await stream.connect()                  # user.on_room(), on_message(bytes), ..., on_end(error)

gRPC's part is a prefix of five bytes to each message, and three headers. To the
server it is a client as any other. To this process it costs a fraction of grpcio's own: that one
hands each message through a poller's thread, a queue, another thread and a pipe, all of which
want the core that the event loop runs on.

Not here: TLS, compression, a second stream.
"""

import asyncio
import base64
import binascii
import struct
from typing import Protocol, cast
from urllib.parse import unquote

import grpc
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from core.address import parse_address
from core.log import get_logger
from rpc.http2_connection import STREAM, Http2Connection
from rpc.options import (
    KEEPALIVE_MILLISECONDS,
    KEEPALIVE_TIMEOUT_MILLISECONDS,
    MAX_MESSAGE_BYTES,
)

log = get_logger("rpc.grpc_stream")

# From the name of the peer to its first frame.
CONNECT_SECONDS = 2.0
# What the peer may send before it is told that it was read.
WINDOW_BYTES = 16 * 2**20
TICK_SECONDS = 0.5
PING_AFTER_TICKS = round(KEEPALIVE_MILLISECONDS / 1000 / TICK_SECONDS)
GONE_AFTER_TICKS = PING_AFTER_TICKS + round(KEEPALIVE_TIMEOUT_MILLISECONDS / 1000 / TICK_SECONDS)
PING = b"epserve."

_ENDS = (StreamEnded, StreamReset)
_PREFIX = struct.Struct(">BI")  # of a message: compressed or not, bytes
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# What an HTTP/2 error means to a call (gRPC's PROTOCOL-HTTP2); of all others INTERNAL.
_CODE_OF_RESET: dict[int | None, grpc.StatusCode] = {
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}

Headers = dict[str, str]


class MessageError(Exception):
    """What the peer sent is no gRPC."""


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
        self._http = Http2Connection(WINDOW_BYTES)
        self._unsent = b""
        self._is_writable = False
        self._is_ending = False
        self._body = bytearray()

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent now; else `on_room` will tell."""
        return self._is_writable and not (self._unsent or self._is_ending or self._is_over)

    async def connect(self) -> None:
        """Returns once the server speaks HTTP/2, or the stream has ended."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._loop.create_connection(lambda: self, *self._address)
                await self._greeted
        except (OSError, UnicodeError) as error:  # the latter for hosts that can have no name
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
        self._http.open(self._request_headers())
        self._write_out()
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
            received = self._http.receive(data)
            # The library has seen all of it already: of a stream whose end comes after what
            # is looked at now, it takes nothing more.
            self._is_ending = any(isinstance(one, _ENDS) for one in received)
            for one in received:
                if self._is_over:
                    return
                if isinstance(one, bytes):
                    self._http.on_read(len(one))
                    self._accept_data(one)
                else:
                    self._accept(one)
            if not self._is_over:
                self._write_out()  # what the library answers by itself
        except (ProtocolError, MessageError, UnicodeDecodeError) as error:
            self._break(f"{self._address} does not speak gRPC as agreed: {error}")
        except Exception:
            log.exception("stream ended by an unexpected exception")
            self._end_with(grpc.StatusCode.INTERNAL, "internal error")

    def _tick(self) -> None:
        """A peer whose machine vanished says nothing, not even to a ping."""
        self._num_silent_ticks += 1
        if self._num_silent_ticks >= GONE_AFTER_TICKS:
            self._break(f"{self._address} does not answer")
            return
        if self._num_silent_ticks == PING_AFTER_TICKS:
            self._http.ping(PING)
            self._write_out()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    # ---- out

    def _request_headers(self) -> list[tuple[str, str]]:
        return [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", self._path),
            (":authority", str(self._address)),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-accept-encoding", "identity"),
            ("user-agent", "epserve"),
        ]

    def _push(self) -> None:
        """Sends as much as the peer, and the transport, take."""
        assert self._transport is not None
        position = 0
        while position < len(self._unsent) and self._is_writable and not self._is_ending:
            room = self._http.room
            if room <= 0:
                break
            frame = self._http.data_frame(self._unsent[position : position + room])
            position += room
            self._transport.write(frame)
        self._unsent = self._unsent[position:]

    def _write_out(self) -> None:
        if content := self._http.data_to_send():
            assert self._transport is not None
            self._transport.write(content)

    def _tell_room(self) -> None:
        if self.has_room:
            self._user.on_room()

    # ---- in

    def _accept(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, STREAM)
            self._accept_data(event.data)
        elif isinstance(event, RemoteSettingsChanged | WindowUpdated):
            if not self._greeted.done():
                self._greeted.set_result(None)
            self._write_out()  # larger frames are taken after the answer to what allows them
            self._push()
            self._tell_room()
        elif isinstance(event, ResponseReceived):
            self._accept_response(_text(event.headers))
        elif isinstance(event, TrailersReceived):
            self._end_as(_text(event.headers))
        elif isinstance(event, StreamEnded):
            self._end_with(grpc.StatusCode.INTERNAL, "the stream ended without a status")
        elif isinstance(event, StreamReset):
            code = _CODE_OF_RESET.get(event.error_code, grpc.StatusCode.INTERNAL)
            self._end_with(code, f"{self._address} reset the stream ({event.error_code})")
        elif isinstance(event, ConnectionTerminated) and (event.last_stream_id or 0) < STREAM:
            self._break(f"{self._address} takes no more calls")

    def _accept_response(self, headers: Headers) -> None:
        if "grpc-status" in headers:  # all that there is: trailers only
            self._end_as(headers)
        elif headers.get(":status") != "200":
            self._break(f"{self._address} answers with HTTP status {headers.get(':status')}")

    def _accept_data(self, data: bytes) -> None:
        body: bytes | bytearray = data
        if self._body:
            self._body += data
            body = self._body
        position = 0
        while len(body) - position >= _PREFIX.size and not self._is_over:
            compressed, num_bytes = _PREFIX.unpack_from(body, position)
            if compressed or num_bytes > MAX_MESSAGE_BYTES:
                raise MessageError("a message that is compressed, or too large")
            begin = position + _PREFIX.size
            if len(body) < begin + num_bytes:
                break
            position = begin + num_bytes
            self._user.on_message(bytes(body[begin:position]))
        if body is data:
            self._body += data[position:]
        else:
            del self._body[:position]

    # ---- the end

    def _end_as(self, trailers: Headers) -> None:
        number = trailers.pop("grpc-status", "")
        code = _CODES.get(int(number)) if number.isascii() and number.isdigit() else None
        if code is grpc.StatusCode.OK and not self._is_over:
            self._finish()
            self._user.on_end(None)
            return
        message = unquote(trailers.pop("grpc-message", ""))
        self._end_with(code or grpc.StatusCode.UNKNOWN, message, trailers)

    def _break(self, message: str) -> None:
        self._end_with(grpc.StatusCode.UNAVAILABLE, message)

    def _end_with(
        self, code: grpc.StatusCode, message: str, trailers: Headers | None = None
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


def _text(headers: object) -> Headers:
    return {str(name): str(value) for name, value in cast("list[tuple[str, str]]", headers)}


def _value(name: str, value: str) -> str | bytes:
    """gRPC's binary headers come in base64."""
    if not name.endswith("-bin"):
        return value
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4))
    except binascii.Error:
        return b""
