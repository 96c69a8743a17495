"""One streamed request to an OpenAI-compatible server, with the time of each event.

Hand-made over a socket: on a small machine the load generator runs beside what it measures,
and a general HTTP client takes several times the CPU a token.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_MAX_LINE_BYTES = 4 * 2**20


class StreamError(Exception):
    """The server refused, broke off, or does not speak the protocol. `code` is that of a streamed
    error, or the HTTP status of a refusal."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    secure: bool
    path: str  # before /v1, without a slash at the end

    @classmethod
    def parse(cls, url: str) -> "Target":
        """From http://host[:port][/path][/v1]. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not http://host:port")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, path)


@dataclass(slots=True)
class Streamed:
    """What came back; times in seconds of `time.perf_counter`."""

    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # events that carried output
    finished_at: float = 0.0
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""


async def stream(
    target: Target,
    endpoint: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    into: Streamed | None = None,
) -> Streamed:
    """POSTs `body` with streaming and usage switched on and reads to the end. `into` has what came
    of a stream that fails, too.

    Raises StreamError for an HTTP or streamed error and for an answer without [DONE];
    OSError when there is no connection.
    """
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    result = into or Streamed()
    result.sent_at = time.perf_counter()
    context = ssl.create_default_context() if target.secure else None
    reader, writer = await asyncio.open_connection(
        target.host, target.port, ssl=context, limit=_MAX_LINE_BYTES
    )
    try:
        writer.write(_head(target, endpoint, len(payload), headers) + payload)
        await writer.drain()
        status, chunked = await _read_head(reader)
        if status != 200:
            raise StreamError(f"HTTP {status}: {await _error_text(reader)}", str(status))
        done = False
        async for line in _lines(reader, chunked):
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                _take_event(result, json.loads(line[6:]), time.perf_counter())
        if not done:
            raise StreamError("the stream ended without [DONE]")
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise StreamError(f"broken answer: {error}") from error
    finally:
        writer.close()
    return result


def _head(target: Target, endpoint: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"POST {target.path}{endpoint} HTTP/1.1",
        f"host: {target.host}:{target.port}",
        "content-type: application/json",
        "accept: text/event-stream",
        f"content-length: {length}",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """HTTP status, and whether the body is chunked."""
    first = (await reader.readline()).split(maxsplit=2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/"):
        raise StreamError("the server closed the connection or does not speak HTTP")
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked = chunked or (line.startswith(b"transfer-encoding:") and b"chunked" in line)
    return int(first[1]), chunked


async def _error_text(reader: asyncio.StreamReader) -> str:
    text = (await reader.read(2000)).decode(errors="replace")
    start, end = text.find("{"), text.rfind("}")
    try:
        return str(json.loads(text[start : end + 1])["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].strip()


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Lines of the body without their ends; the last one may be cut off."""
    if not chunked:
        while line := await reader.readline():
            yield line.rstrip(b"\r\n")
        return
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def _take_event(result: Streamed, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        error = event["error"]
        error = error if isinstance(error, dict) else {"message": error}
        raise StreamError(str(error.get("message", error)), str(error.get("code") or ""))
    if usage := event.get("usage"):
        result.num_prompt_tokens = usage["prompt_tokens"]
        result.num_output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.num_cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or ""
        result.text += text
        result.finish_reason = reason or result.finish_reason
        # A chat's first event names the role and carries no token.
        if text or (reason and not result.token_times):
            result.token_times.append(now)
        result.finished_at = now
