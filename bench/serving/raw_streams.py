"""Streams read as bytes with times, and looked at afterwards.

The load generator runs beside what it measures: while it reads, it does next to nothing.
"""

import asyncio
import json
import re
import time
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, cast

# Of a body in chunks. No event ends like it.
LAST_CHUNK = b"\r\n0\r\n\r\n"
CONTENT = re.compile(rb'"content":"((?:[^"\\]|\\.)*)"')


class RawStream(asyncio.Protocol):
    """One POST whose answer is a stream."""

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self.sent_at = 0.0
        self.ended = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        self._times: list[float] = []
        content = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        ).encode() + content

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_at = time.monotonic()
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.monotonic())
        self._parts.append(data)

    def close(self) -> None:
        """Leaves, wherever the stream is."""
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_complete(self) -> bool:
        return b"data: [DONE]" in b"".join(self._parts[-3:])

    def tail(self) -> str:
        """The end of the answer, for messages about one that failed."""
        return b"".join(self._parts)[-600:].decode(errors="replace")

    def arrivals(self) -> tuple[str, list[float]]:
        """The output, and when each character of it arrived on the monotonic clock; for plain
        ASCII output."""
        ends, total = [], 0
        for part in self._parts:
            total += len(part)
            ends.append(total)
        text = ""
        times: list[float] = []
        for match in CONTENT.finditer(b"".join(self._parts)):
            index = min(bisect_right(ends, match.end() - 1), len(ends) - 1)
            text += match.group(1).decode()
            times += [self._times[index]] * len(match.group(1))
        return text, times


class KeptConnections:
    """Connections that carry one request after the other, as those of clients' SDKs do."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._idle: list[_Kept] = []

    async def send(self, stream: RawStream) -> None:
        """On an idle connection, or on a new one. Raises OSError."""
        kept = self._idle.pop() if self._idle else None
        if kept is None:
            loop = asyncio.get_running_loop()
            _, kept = await loop.create_connection(lambda: _Kept(self._idle), *self._address)
        kept.begin(stream)

    def close(self) -> None:
        for kept in self._idle:
            kept.close()


class _Kept(asyncio.Protocol):
    def __init__(self, idle: "list[_Kept]") -> None:
        self._idle = idle
        self._stream: RawStream | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def begin(self, stream: RawStream) -> None:
        self._stream = stream
        stream.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            return
        self._stream.data_received(data)
        self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK:
            self._tail = b""
            self._end()
            self._idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self._end()

    def close(self) -> None:
        self._transport.abort()

    def _end(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.connection_lost(None)
