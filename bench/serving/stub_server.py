"""The least of a gRPC server, in the event loop: for stand-ins that must not be what is measured.

grpcio's own takes more of a core for a request than the gateway does. Peers are trusted to speak
gRPC; whatever else they say ends their connection.
"""

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

_PREFIX = struct.Struct(">BI")
FRAME_BYTES = 16384
# More than any run sends: no peer has to be told that it was read.
WINDOW_BYTES = 2**31 - 1
FIRST_WINDOW_BYTES = 65535

# What becomes of the messages of one stream; called with a way to answer when it begins.
Send = Callable[[bytes], None]
OnMessage = Callable[[bytes], None]
Method = Callable[[Send], OnMessage]


def unary(respond: Callable[[], bytes]) -> Method:
    """A method with one response, whatever it is asked."""
    return lambda send: lambda request: send(respond())


class StubServer(asyncio.Protocol):
    """One connection; `methods` by path. Those in `streaming` have no end."""

    def __init__(self, methods: Mapping[str, Method], streaming: frozenset[str]) -> None:
        self._methods = methods
        self._streaming = streaming
        self._streams: dict[int, _Stream] = {}
        self._http = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )

    @classmethod
    async def listen(
        cls,
        methods: Mapping[str, Method],
        *,
        streaming: frozenset[str],
        tls: ssl.SSLContext | None = None,
    ) -> tuple[asyncio.Server, str]:
        """On a free port; with the address."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: cls(methods, streaming), "127.0.0.1", 0, ssl=tls)
        return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http.initiate_connection()
        self._http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        self._http.increment_flow_control_window(WINDOW_BYTES - FIRST_WINDOW_BYTES)
        self._write_out()

    def data_received(self, data: bytes) -> None:
        try:
            events = self._http.receive_data(data)
        except ProtocolError:
            # Also what was under way when a peer says farewell.
            self._transport.close()
            return
        for event in events:
            if isinstance(event, ConnectionTerminated):
                self._transport.close()
                return
            if isinstance(event, RequestReceived):
                self._begin(event.stream_id, _path(event))
            elif isinstance(event, DataReceived) and event.stream_id in self._streams:
                self._streams[event.stream_id].feed(event.data)
            elif isinstance(event, StreamEnded | StreamReset):
                self._streams.pop(event.stream_id, None)
        self._write_out()

    def _begin(self, number: int, path: str) -> None:
        stream = self._streams[number] = _Stream(self._http, number, path in self._streaming)
        stream.on_message = self._methods[path](self._sender(stream))

    def _sender(self, stream: "_Stream") -> Send:
        def send(content: bytes) -> None:
            if not self._transport.is_closing():
                with suppress(ProtocolError):  # of a stream that its peer has reset
                    stream.send(content)
                self._write_out()

        return send

    def _write_out(self) -> None:
        if content := self._http.data_to_send():
            self._transport.write(content)


class _Stream:
    """NOTE: it does not wait for the peer's windows: those that it meets are wide, and never used
    up."""

    on_message: OnMessage

    def __init__(self, http: H2Connection, number: int, is_endless: bool) -> None:
        self._http = http
        self._number = number
        self._is_endless = is_endless
        self._has_begun = False
        self._body = b""

    def feed(self, content: bytes) -> None:
        self._body += content
        while len(self._body) >= _PREFIX.size:
            _, num_bytes = _PREFIX.unpack_from(self._body)
            end = _PREFIX.size + num_bytes
            if len(self._body) < end:
                return
            message, self._body = self._body[_PREFIX.size : end], self._body[end:]
            self.on_message(message)

    def send(self, content: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            head = [(":status", "200"), ("content-type", "application/grpc")]
            self._http.send_headers(self._number, head)
        body = _PREFIX.pack(0, len(content)) + content
        for begin in range(0, len(body), FRAME_BYTES):
            self._http.send_data(self._number, body[begin : begin + FRAME_BYTES])
        if not self._is_endless:
            self._http.send_headers(self._number, [("grpc-status", "0")], end_stream=True)


def _path(event: RequestReceived) -> str:
    (path,) = (str(value) for name, value in event.headers if str(name) == ":path")
    return path
