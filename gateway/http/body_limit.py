"""ASGI middleware: bodies are bounded in size and in time, however they are sent."""

import asyncio
from collections.abc import Awaitable

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.base.openai_error import http_error_response

# Read and discarded of a body that is too large: a client that is answered while it still sends
# may see a broken connection instead of the answer.
MAX_DISCARDED_BYTES = 64 * 2**20
MAX_DISCARD_SECONDS = 5.0

CLOSE = {"connection": "close"}


class BodyLimit:
    """Answers 413 to bodies over `max_bytes` and 408 to those not there in `timeout_seconds`.

    Counts while reading: a chunked body declares no length, and a declared one may be wrong.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        if _declared_bytes(scope) > self._max_bytes:
            return self._refuse(scope, receive, send)
        return self._app(scope, self._counting(receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if b"expect" not in dict(scope["headers"]):  # else it waits, and reading would ask for it
            await _discard(receive)
        response = http_error_response(413, self._too_large(), CLOSE)
        await response(scope, receive, send)

    def _counting(self, receive: Receive) -> Receive:
        """`receive` that raises HTTPException (which the framework lets through) in time."""
        num_bytes = 0
        is_complete = False
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds

        async def counted() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what still comes is the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                text = f"the body did not arrive within {self._timeout_seconds:g} s"
                raise HTTPException(408, text, CLOSE) from error
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                if not is_complete:
                    await _discard(receive)
                raise HTTPException(413, self._too_large(), CLOSE)
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"


def _declared_bytes(scope: Scope) -> int:
    """The Content-Length header; 0 when there is none (the server refuses malformed ones)."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(MAX_DISCARD_SECONDS):
            while num_bytes < MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
