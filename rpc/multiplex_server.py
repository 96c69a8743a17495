"""The server's side of `Multiplex`: calls of other services, carried by one stream.

Each call runs as if it had come alone: its own task, deadline, request id and error status.
What calls respond while a frame is on its way goes out together in the next frame.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol

import grpc

from core.errors import DeadlineExceeded, Draining, EpserveError, InvalidRequest, Overloaded
from core.log import REQUEST_ID
from core.trace_context import TRACE, parse_trace
from proto import multiplex_pb2_grpc
from proto.multiplex_pb2 import CallEnd, CallPiece, ClientFrame, OpenCall, ServerFrame
from rpc.interceptor import REQUEST_ID_KEY, CallInterceptor, read_message
from rpc.status import header_text, short_message

# What may be on its way that the peer has not said to have read: so many frames, or more of them
# with so few pieces. Twice what it reads before it says so, so that they do not wait for each
# other.
MAX_UNREAD_FRAMES = 4
MAX_UNREAD_PIECES = 64
MAX_UNREAD_SMALL_FRAMES = 64
# Responses that wait for a peer that does not read; past it the calls of the session wait.
MAX_PENDING_BYTES = 4 * 2**20
# An empty frame comes so often: a process that is stuck sends none, whatever the library answers in
# its place.
BEAT_SECONDS = 1.0


class Method(Protocol):
    """What grpc keeps of a method with one request, and one response or a stream of them."""

    request_deserializer: Callable[[bytes], Any]
    response_serializer: Callable[[Any], bytes]
    response_streaming: bool
    unary_unary: Callable[[Any, Any], Awaitable[Any]]
    unary_stream: Callable[[Any, Any], AsyncIterator[Any]]


class CallContext:
    """The part of grpc's context that methods may use when they are called this way."""

    def __init__(self, opened: OpenCall) -> None:
        self._request_id = opened.request_id
        self._until = None
        if opened.timeout_seconds > 0:
            self._until = asyncio.get_running_loop().time() + opened.timeout_seconds

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._until is None else self._until - asyncio.get_running_loop().time()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((REQUEST_ID_KEY, self._request_id),) if self._request_id else ()


class MultiplexService(multiplex_pb2_grpc.MultiplexServicer):
    """`methods` by their full names; `calls` counts each call like one that came alone."""

    def __init__(
        self, methods: Mapping[str, Method], calls: CallInterceptor, *, max_calls: int
    ) -> None:
        self._methods = methods
        self._calls = calls
        self._max_calls = max_calls
        self._is_stopping = False

    def refuse(self) -> None:
        """From now on no call is accepted; those that run go on."""
        self._is_stopping = True

    async def Session(  # noqa: N802 - the name is the contract's
        self,
        requests: AsyncIterator[ClientFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[ServerFrame]:
        session = _Session(self)
        reading = asyncio.create_task(session.read(requests))
        ending = asyncio.create_task(self._calls.end_watches.wait())
        both: tuple[asyncio.Task[Any], ...] = (reading, ending)
        for task in both:
            task.add_done_callback(lambda _: session.changed.set())
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + BEAT_SECONDS
        try:
            while True:
                if loop.time() >= beat_at:
                    beat_at = loop.time() + BEAT_SECONDS
                    yield ServerFrame()
                frame = session.take()
                if frame is not None and frame.pieces:
                    yield frame
                    continue  # and looks again at all that changed meanwhile
                if ending.done() or session.is_broken or (reading.done() and not session.tasks):
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(beat_at):
                        await session.changed.wait()
        finally:
            tasks = [*both, *session.tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def method(self, name: str) -> Method:
        """Raises EpserveError when no call of it can be taken now."""
        if self._is_stopping:
            raise Draining("server is stopping")
        if self._calls.num_running >= self._max_calls:
            raise Overloaded(f"{self._max_calls} calls are running already")
        method = self._methods.get(name)
        if method is None:
            raise InvalidRequest(f"no method {name!r} is multiplexed here")
        return method

    async def run(self, opened: OpenCall, respond: "Callable[[bytes], asyncio.Event]") -> None:
        """One call to its end; raises EpserveError for any other end than a good one."""
        method = self.method(opened.method)
        REQUEST_ID.set(header_text(opened.request_id))
        if opened.traceparent:
            TRACE.set(parse_trace(opened.traceparent, opened.tracestate))
        context = CallContext(opened)
        end = self._calls.enter(opened.method)
        try:
            async with asyncio.timeout(opened.timeout_seconds or None):
                request = read_message(method.request_deserializer, opened.request)
                if not method.response_streaming:
                    response = await method.unary_unary(request, context)
                    respond(method.response_serializer(response))
                    end.code = "OK"
                    return
                async with aclosing(method.unary_stream(request, context)) as responses:  # type: ignore[type-var]
                    async for response in responses:
                        room = respond(method.response_serializer(response))
                        if not room.is_set():
                            await room.wait()
            end.code = "OK"
        except TimeoutError as error:
            raise end.fail(DeadlineExceeded("the call's deadline is over")) from error
        except EpserveError as error:
            end.fail(error)
            raise  # not from itself: it would never go without the garbage collector
        except Exception as error:
            raise end.fail(error) from error
        finally:
            self._calls.leave(end)


class _Session:
    """One stream: its running calls, and what waits to be sent."""

    def __init__(self, service: MultiplexService) -> None:
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self.is_broken = False  # the peer opened a call that was open
        self._service = service
        self._responses: dict[int, list[bytes]] = {}
        self._ends: dict[int, CallEnd] = {}
        self._num_bytes = 0
        self._unread: deque[int] = deque()  # pieces of each frame on its way
        self._num_unread_pieces = 0
        self._room = asyncio.Event()
        self._room.set()

    async def read(self, frames: AsyncIterator[ClientFrame]) -> None:
        async for frame in frames:
            for _ in range(min(frame.num_read, len(self._unread))):
                self._num_unread_pieces -= self._unread.popleft()
            self.changed.set()
            for opened in frame.open:
                if opened.call in self.tasks:
                    self.is_broken = True  # whose responses are whose?
                    return
                task = asyncio.create_task(self._run(opened))
                self.tasks[opened.call] = task
                task.add_done_callback(partial(self._forget, opened.call))
            for call in frame.cancel:
                running = self.tasks.get(call)
                if running is not None:
                    running.cancel()

    def take(self) -> ServerFrame | None:
        """Everything that waits; None while the peer is slow to read."""
        self.changed.clear()
        if self._is_peer_behind():
            return None
        responses, self._responses = self._responses, {}
        ends, self._ends = self._ends, {}
        self._num_bytes = 0
        self._room.set()
        pieces = [
            CallPiece(call=call, responses=b"".join(parts), end=ends.pop(call, None))
            for call, parts in responses.items()
        ]
        pieces += [CallPiece(call=call, end=end) for call, end in ends.items()]
        if pieces:
            self._unread.append(len(pieces))
            self._num_unread_pieces += len(pieces)
        return ServerFrame(pieces=pieces)

    def _is_peer_behind(self) -> bool:
        num_frames = len(self._unread)
        if num_frames >= MAX_UNREAD_SMALL_FRAMES:
            return True
        return num_frames >= MAX_UNREAD_FRAMES and self._num_unread_pieces >= MAX_UNREAD_PIECES

    async def _run(self, opened: OpenCall) -> None:
        call = opened.call
        parts: list[bytes] | None

        def respond(content: bytes) -> asyncio.Event:
            nonlocal parts
            parts = self._responses.get(call)
            if parts is None:
                parts = self._responses[call] = []
            parts.append(content)
            self._num_bytes += len(content)
            if self._num_bytes > MAX_PENDING_BYTES:
                self._room.clear()
            self.changed.set()
            return self._room

        try:
            await self._service.run(opened, respond)
            self._ends[call] = CallEnd(code="OK")
        except EpserveError as error:
            self._ends[call] = _end_of(error)
        self.changed.set()

    def _forget(self, call: int, _: asyncio.Task[None]) -> None:
        """Also of a call that was cancelled before it ran at all."""
        del self.tasks[call]
        self.changed.set()


def _end_of(error: EpserveError) -> CallEnd:
    return CallEnd(
        code=error.status.grpc,
        message=short_message(error),
        error_code=error.status.code,
        error_param=error.param or "",
        failed_epoch=error.failed_epoch,
        retry_after_seconds=error.retry_after_seconds,
    )
