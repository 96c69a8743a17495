"""uvicorn's HTTP connection, with bounds on heads in time and size and OpenAI's error object for
what is no HTTP. It is in the scope of each request, to be told when the client leaves (without a
task that waits for it) and to cut off a client that does not read.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.base.openai_error import error_object
from gateway.http.request_parser import RequestParser

# In the scope of a request: its `HttpProtocol`.
CONNECTION = "epserve.connection"

# From the connection, or the first byte of a request, to the end of its headers.
HEAD_SECONDS = 20.0
MAX_HEAD_BYTES = 64 * 2**10


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._num_head_bytes = 0
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls back once the client of the request that is answered now has left."""
        self._on_lost = on_lost
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
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Most heads come whole: no timer for those.
        if self._head_timer is None and (self._is_in_head or self._is_idle()):
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[CONNECTION] = self
        self._num_head_bytes = 0
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.skips:
            self._head_is_there()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.skips:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP; replaces uvicorn's plain text."""
        body = error_object("invalid HTTP request", "invalid_request_error", None, "invalid_value")
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _is_idle(self) -> bool:
        """Nothing is being answered; any data, even blank lines, has ended uvicorn's timer."""
        return self.cycle is not None and self.cycle.response_complete and not self.pipeline

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _head_is_there(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too large")  # the parser ends with an error
