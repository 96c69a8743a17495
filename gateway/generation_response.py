"""The response to a generation request: runs it, streams or collects it, ends it with the client.

nothing sent yet   an error becomes an HTTP status with OpenAI's error object
stream has begun   an error becomes one event with that object, and the stream ends
client gone        everything that was started for it is cancelled at once
client not reading the same, a moment behind the request's deadline
"""

import asyncio
from typing import NamedTuple

from fastapi import Response
from starlette.types import Receive, Scope, Send

from core.clock import Clock
from core.errors import DeadlineExceeded, EpserveError, InternalError
from core.log import get_logger
from gateway.admission import Admission
from gateway.job import Job
from gateway.metrics import GatewayMetrics
from gateway.openai_error import error_body
from gateway.piece import Piece, join_pieces
from gateway.reply import SSE_DONE, Reply, sse_event
from gateway.run import Run

log = get_logger("gateway.generation")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]

# The workers' own answer to a deadline is better than ours: they get a moment to give it.
PATIENCE_SECONDS = 1.0


class Serving(NamedTuple):
    """What all generation responses share."""

    admission: Admission
    metrics: GatewayMetrics
    clock: Clock


class GenerationResponse(Response):
    """An ASGI response of its own: Starlette's streaming one cannot see an error before the
    first byte, nor a client that leaves while there is nothing to send."""

    def __init__(self, job: Job, run: Run, reply: Reply, serving: Serving) -> None:
        super().__init__()
        self._job = job
        self._run = run
        self._reply = reply
        self._serving = serving
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises EpserveError only while nothing has been sent."""
        outcome = "internal"
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            patience = self._job.deadline - self._serving.clock.now() + PATIENCE_SECONDS
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=patience)
            if work.done():
                outcome = work.result()
            elif gone.done():
                outcome = "disconnected"
            else:
                outcome = "deadline_exceeded"
                if not self._has_begun:
                    raise DeadlineExceeded("the request's deadline is over")
        except EpserveError as error:
            outcome = error.status.code
            raise
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._record(outcome)

    async def _work(self, send: Send) -> str:
        """Returns the outcome: ok, or the code of an error that the client was told in the
        stream."""
        with self._serving.admission.slot(self._run):
            if self._job.stream:
                return await self._stream(send)
            await self._collect(send)
            return "ok"

    async def _collect(self, send: Send) -> None:
        parts: list[list[Piece]] = [[] for _ in range(self._job.num_choices)]
        async with self._run as run:
            async for pieces in run:
                for index, piece in pieces:
                    parts[index].append(piece)
        choices = [join_pieces(parts[index]) for index in self._run.returned()]
        body = self._reply.whole(choices, self._run.usage())
        length = (b"content-length", str(len(body)).encode())
        self._has_begun = True
        await send(_start([*JSON_HEADERS, length]))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> str:
        outcome = "ok"
        try:
            async with self._run as run:
                opened: set[int] = set()
                async for pieces in run:
                    if not self._has_begun:
                        self._has_begun = True
                        await send(_start(STREAM_HEADERS))
                    await send(_body(self._events(pieces, opened)))
            last = self._reply.usage_event(run.usage()) if self._job.include_usage else b""
            last += SSE_DONE
        except EpserveError as error:
            if not self._has_begun:
                raise
            outcome = error.status.code
            last = sse_event(error_body(error))
            log.warning("stream ended early", code=outcome, message=error.message)
        except Exception:
            if not self._has_begun:
                raise
            log.exception("stream ended by an unexpected exception")
            outcome = "internal"
            last = sse_event(error_body(InternalError("internal error")))
        await send(_body(last, more=False))
        return outcome

    def _events(self, pieces: list[tuple[int, Piece]], opened: set[int]) -> bytes:
        """All that is new in one write."""
        events = []
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                events.append(self._reply.opening(index))
            events.append(self._reply.events(index, piece))
        return b"".join(events)

    def _record(self, outcome: str) -> None:
        usage = self._run.usage()
        seconds = self._serving.clock.now() - self._job.arrived_at
        self._serving.metrics.requests.labels(outcome=outcome).inc()
        self._serving.metrics.latency.observe(seconds)
        log.info(
            "generation ended",
            id=self._job.id,
            outcome=outcome,
            endpoint=self._job.endpoint,
            stream=self._job.stream,
            num_choices=self._job.num_choices,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            num_moves=self._run.num_moves,
            seconds=round(seconds, 6),
        )


def _start(headers: list[tuple[bytes, bytes]]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def _body(content: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
