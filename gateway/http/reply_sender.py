"""One response on its way to a client that may read slowly, or not at all."""

import asyncio

from starlette.types import Send

from core.clock import Clock

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]


class ReplySender:
    """Sends, and knows since when it waits for the client: the server lets a write wait while
    more than 64 KiB are not read."""

    def __init__(self, send: Send, clock: Clock, ping: bytes = b": ping\n\n") -> None:
        """`ping` is an event, or a comment, which clients skip."""
        self.has_begun = False
        self._send = send
        self._clock = clock
        self._ping = ping
        self._last_at = clock.now()  # when a write began, or the work
        self._has_work = False
        self._is_writing = False
        self._pinging: asyncio.Task[None] | None = None

    def begin_work(self) -> None:
        """The request is let in: from now on its client may wonder about silence."""
        self._has_work = True
        self._last_at = self._clock.now()

    def silent_seconds(self, now: float) -> float:
        """Since the last write, or the work, began; 0 before."""
        return now - self._last_at if self._has_work else 0.0

    def stalled_seconds(self, now: float) -> float:
        """How long the client has kept a write waiting; 0 when none waits."""
        return now - self._last_at if self._is_writing else 0.0

    async def whole(self, body: bytes) -> None:
        """A JSON reply."""
        length = (b"content-length", str(len(body)).encode())
        await self._write(body, [*JSON_HEADERS, length], more=False)

    async def events(self, content: bytes, *, more: bool = True) -> None:
        """Part of a stream."""
        if self._pinging is not None:
            await self._pinging  # it may wait for the client
            self._pinging = None
        await self._write(content, STREAM_HEADERS, more=more)

    def ping(self) -> None:
        """Sends one, so that silence is not taken for a dead server; not while a write waits."""
        if not self._is_writing:
            self._pinging = asyncio.create_task(self._write(self._ping, STREAM_HEADERS, more=True))

    async def close(self) -> None:
        """Nothing is written after this."""
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)

    async def _write(
        self, content: bytes, headers: list[tuple[bytes, bytes]], *, more: bool
    ) -> None:
        self._last_at = self._clock.now()
        self._is_writing = True
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": list(headers)}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
        self._is_writing = False
