"""uvicorn's HTTP connection, stricter, for clients and proxies of all sorts.

- Bytes are bounded as they come, in time and number; only bodies may be longer (`BodyLimit`).
- What is no HTTP/1.0 or 1.1 request is refused with OpenAI's error object, behind the answers to
  the requests before it.
- Clients that close their half of the connection behind a whole request are answered. HTTP/1.0
  clients get no chunks.

It is in the scope of each request, to be told when the client leaves (without a task that waits
for it) and to cut off a client that does not read.
"""

import asyncio
import re
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.base.openai_error import error_object
from gateway.http.request_parser import RequestParser

# In the scope of a request: its `HttpProtocol`.
CONNECTION = "epserve.connection"

# From the connection, or the first byte of a request, to the end of its headers.
HEAD_SECONDS = 20.0
# Of a head, or of anything else that is no body: chunks' extensions, trailers, blank lines.
MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 128
# Requests that wait for the answers to those before them.
MAX_PIPELINED = 32
# Of the files that this process may open; the rest is for what else it does.
CONNECTIONS_SHARE = 0.75
# A connection whose client has closed its half, or all of it: which one, only writing tells.
PROBE_AFTER_SECONDS = (0.0, 0.25, 2.0)
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients must skip it
# A name or an IPv6 address, with a port or none.
HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]
        self._head_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_head_read = False
        self._num_head_bytes = 0
        self._num_loose_bytes = 0  # since the last piece of a body, or end of a head
        self._num_due = 0  # answers
        self._is_refused = False  # no more requests are taken
        self._refusal = b""  # to be sent behind the answers that are due
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None
        self._ping: Callable[[], None]

    def watch(self, on_lost: Callable[[], None], ping: Callable[[], None]) -> None:
        """Calls back once the client of the request that is answered now has left; `ping` writes
        into the response that has begun, to find out."""
        self._on_lost, self._ping = on_lost, ping
        # Leaving is seen by reading, and a next request may have stopped that.
        self.flow.resume_reading()
        if self._is_lost:
            self.loop.call_soon(on_lost)

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """No more, if it is not for the connection's next request by now."""
        if self._on_lost == on_lost:
            self._on_lost = None

    def abort(self) -> None:
        """Cuts the connection, and with it what the client has not read."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            self._refuse_now(_refusal(503, "too many connections", "overloaded"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether what is due is still sent. TLS knows no half of a connection."""
        is_whole = self._num_due > 0 and not self.cycle.more_body
        if self.scheme != "http" or not (is_whole or self.pipeline or self._refusal):
            if self._is_in_head and not self._is_refused:
                self.send_400_response("")
            return False
        if self._probe_timer is None:
            if self._is_in_head or not is_whole:
                self.send_400_response("")
            elif not self._refusal:
                self.cycle.keep_alive = False
            self._is_refused = True
            self._probe(PROBE_AFTER_SECONDS)
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_loose_bytes += len(data)
        super().data_received(data)
        is_one_line = self._is_in_head and data.endswith(b"\n") and self._names_no_version()
        if (is_one_line or self._num_loose_bytes > MAX_HEAD_BYTES) and not self._is_refused:
            self.send_400_response("")
        # Most heads come whole: no timer for those.
        if self._head_timer is None and (self._is_in_head or self._is_idle()):
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[CONNECTION] = self
        self._num_head_bytes = 0
        self._is_in_head = True
        self._is_head_read = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._is_head_read:  # trailers are left out: they come after all checks
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_loose_bytes = 0
        if self.parser.skips:
            return
        self._check_head()
        self._head_is_there()
        self._is_head_read = True
        super().on_headers_complete()
        self._num_due += 1
        if self.scope["http_version"] == "1.0":
            _leave_unframed(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_loose_bytes = 0
        if not self.parser.skips:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._num_due -= 1
        super().on_response_complete()
        if self._refusal and not self._num_due:
            self._refuse_now(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP; replaces uvicorn's plain text, and waits for its turn."""
        self._head_is_there()
        self._is_refused = True
        refusal = _refusal(400, "invalid HTTP request", "invalid_value")
        if self._num_due and self.cycle.more_body:  # the last request's own body is broken
            if self.pipeline:
                self.pipeline.popleft()
            elif self.cycle.response_started:
                self.transport.close()
            self._num_due -= 1
        if self._num_due:
            self._refusal = refusal
        else:
            self._refuse_now(refusal)

    def _refuse_now(self, refusal: bytes) -> None:
        self._is_refused = True
        if not self.transport.is_closing():
            self.transport.write(refusal)
            self.transport.close()

    def _probe(self, pauses: tuple[float, ...]) -> None:
        """A client that has closed all of the connection answers with a reset."""
        if self.transport.is_closing() or not self._num_due or not pauses:
            return
        if self.cycle.response_started:
            if self._on_lost is not None:
                self._ping()
        elif self.scope["http_version"] == "1.1" and not self.pipeline:
            self.transport.write(PROBE)
        self._probe_timer = self.loop.call_later(pauses[0], self._probe, pauses[1:])

    def _check_head(self) -> None:
        """Raises ValueError for what llhttp lets through; the parser ends with an error then."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ValueError("version")
        if len(self.headers) > MAX_HEADERS or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too much")
        hosts = []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding" and (value.lower(), version) != (b"chunked", "1.1"):
                raise ValueError("transfer-encoding")
        is_told = len(hosts) == 1 or (version == "1.0" and not hosts)
        if not is_told or not all(map(HOST.fullmatch, hosts)):
            raise ValueError("host")

    def _names_no_version(self) -> bool:
        """A request line of HTTP/0.9, behind which nothing more would come."""
        return self.parser.get_http_version() == "0.0"

    def _is_idle(self) -> bool:
        """Nothing is being answered; any data, even blank lines, has ended uvicorn's timer."""
        return self.cycle is not None and self.cycle.response_complete and not self.pipeline

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """No head in time."""
        if self._num_due:
            self.send_400_response("")
        else:
            self.transport.abort()

    def _head_is_there(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too large")  # the parser ends with an error


def _max_connections() -> int:
    return int(CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _refusal(status: int, message: str, code: str) -> bytes:
    """A whole response, the last one of its connection."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = error_object(message, kind, None, code)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def _leave_unframed(cycle: RequestResponseCycle) -> None:
    """The body of the response ends with the connection: HTTP/1.0 knows no chunks."""
    send = cycle.send

    async def send_as_it_is(message: Any) -> None:  # noqa: ANN401 - uvicorn's type is private
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.waiting_for_100_continue = False
    cycle.send = send_as_it_is  # type: ignore[method-assign]
