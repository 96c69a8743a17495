"""The client's side of `Multiplex`: many calls over one stream.

    peer = MultiplexClient("host:port", peer_epoch=worker.epoch)
    with peer.call("/epserve.generate.v1.Decode/Generate", request, timeout_seconds=30) as call:
        while content := await call.take():      # b"" at a good end
            response = GenerateResponse.FromString(content)

gRPC costs about as much CPU a message as everything else that a token needs. Here a frame holds
what all calls were sent since the last one, and a call that is late gets everything at once.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

import grpc

from core.errors import DeadlineExceeded, Draining, EpserveError, InternalError, Unavailable
from core.log import REQUEST_ID, get_logger
from core.trace_context import TRACE, TraceContext
from proto.multiplex_pb2 import CallEnd, ClientFrame, OpenCall, ServerFrame
from proto.multiplex_pb2_grpc import MultiplexStub
from rpc.client import channel
from rpc.status import Disconnected, header_text, is_servers_word, to_error

log = get_logger("rpc.multiplex_client")

# Requests that begin together are spread over frames of about this size.
FRAME_BYTES = 4 * 2**20
# The server is told of so many frames at once, with so many pieces, or of so many with fewer: a
# message back for each would cost as much.
READ_FRAMES = 2
READ_PIECES = 32
READ_SMALL_FRAMES = 32
# A server that has said nothing for so long is stuck. Those of before there were beats say nothing
# while they have nothing to say.
SILENCE_SECONDS = 4.0
LOOK_SECONDS = 0.25
# Responses that one call may have waiting; a reader that is slower loses the call.
MAX_WAITING_BYTES = 512 * 2**10


class MultiplexClient:
    """Calls to the server at `address`; opens a session when there is none."""

    def __init__(
        self,
        address: str,
        *,
        peer_epoch: str = "",
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Inside the running loop. Raises ValueError when `address` is not host:port."""
        self._channel = channel(address)
        self._peer_epoch = peer_epoch
        self._max_waiting_bytes = max_waiting_bytes
        self._session: _Session | None = None

    def call(
        self,
        method: str,
        request: bytes,
        *,
        timeout_seconds: float,
        request_id: str | None = None,
        trace: TraceContext | None = None,
    ) -> "Call":
        """Begins at once; leaving the `with` block of the result ends it. Request id and trace
        are by default those of the current context."""
        if self._session is None or self._session.is_over:
            self._session = _Session(self._channel, self._peer_epoch)
        text = header_text(REQUEST_ID.get() if request_id is None else request_id)
        opened = OpenCall(
            method=method, request=request, timeout_seconds=timeout_seconds, request_id=text
        )
        trace = trace or TRACE.get()
        if trace is not None:
            opened.traceparent, opened.tracestate = trace
        return Call(self._session, opened, self._max_waiting_bytes)

    async def close(self) -> None:
        """Ends the session and the connection; calls fail."""
        if self._session is not None:
            await self._session.close()
        await self._channel.close(None)


class Call:
    """One call: what has come and was not taken yet."""

    def __init__(self, session: "_Session", opened: OpenCall, max_waiting_bytes: int) -> None:
        self._session = session
        self._max_waiting_bytes = max_waiting_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._error: EpserveError | None = None
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer = loop.call_later(opened.timeout_seconds, self._expire)
        self._id = session.add(self, opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._is_over:
            self._leave(None)
        self._error = None  # whose frames know this call

    async def take(self) -> bytes:
        """All responses that are there, at least one, to be parsed as one message; b"" at the
        end. Raises what the server meant by any other end, and DeadlineExceeded."""
        while not self._parts:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        parts, self._parts = self._parts, []
        self._num_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def feed(self, content: bytes) -> None:
        if self._is_over:
            return
        self._num_bytes += len(content)
        if self._parts and self._num_bytes > self._max_waiting_bytes:
            self._leave(DeadlineExceeded("the reply is not read as fast as it is generated"))
            return
        self._parts.append(content)
        self._wake()

    def end(self, error: EpserveError | None) -> None:
        """Nothing comes any more; what is there can still be taken."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._timer.cancel()
            self._wake()

    def _leave(self, error: EpserveError | None) -> None:
        self.end(error)
        self._session.leave(self._id)

    def _expire(self) -> None:
        self._leave(DeadlineExceeded("the request's deadline is over"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Session:
    """One stream with its calls. It fails as a whole, and is never used again."""

    def __init__(self, peer: grpc.aio.Channel, peer_epoch: str) -> None:
        self.is_over = False
        self._peer_epoch = peer_epoch
        self._calls: dict[int, Call] = {}
        self._last_id = 0
        self._opening: deque[OpenCall] = deque()
        self._cancelled: list[int] = []
        self._num_read = 0  # frames, and their pieces, that the server was not told of
        self._num_pieces_read = 0
        self._silent_seconds = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._stream = MultiplexStub(peer).Session(None)
        self._reading = asyncio.create_task(self._read())
        self._writing: asyncio.Task[None] | None = None

    def add(self, call: Call, opened: OpenCall) -> int:
        self._last_id += 1
        opened.call = self._last_id
        self._calls[self._last_id] = call
        self._opening.append(opened)
        self._flush_soon()
        return self._last_id

    def leave(self, call_id: int) -> None:
        """The server is told that nobody wants more of a call."""
        if self._calls.pop(call_id, None) is not None and not self.is_over:
            self._cancelled.append(call_id)
            self._flush_soon()

    async def close(self) -> None:
        self._end_all(Unavailable("the connection is closing"))
        self._stream.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    # ---- out

    def _flush_soon(self) -> None:
        """What is asked for in one turn of the loop goes out together."""
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                await self._stream.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            """The stream is over: its reader tells."""
        finally:
            self._writing = None

    def _next_frame(self) -> ClientFrame | None:
        """What the server is to be told next; None when there is nothing."""
        num_read = self._num_read if self._has_read_much() else 0
        if not (self._opening or self._cancelled or num_read):
            return None
        cancelled = self._take_cancelled()
        opening: list[OpenCall] = []
        num_bytes = 0
        while self._opening and num_bytes < FRAME_BYTES:
            opened = self._opening.popleft()
            num_bytes += len(opened.request)
            opening.append(opened)
        num_read, self._num_read = self._num_read, 0
        self._num_pieces_read = 0
        return ClientFrame(open=opening, cancel=cancelled, num_read=num_read)

    def _take_cancelled(self) -> set[int]:
        """Calls that the server is to end. Those that it has never heard of are dropped here: a
        later frame would open what an earlier one has cancelled."""
        if not self._cancelled:
            return set()
        cancelled, self._cancelled = set(self._cancelled), []
        if self._opening:
            waiting = self._opening
            self._opening = deque(opened for opened in waiting if opened.call not in cancelled)
            cancelled.difference_update(opened.call for opened in waiting)
        return cancelled

    # ---- in

    async def _read(self) -> None:
        error: EpserveError = Draining("the server is stopping", failed_epoch=self._peer_epoch)
        try:
            async for frame in self._stream:
                self._silent_seconds = 0.0
                if not frame.pieces:
                    self._watching = self._watching or asyncio.create_task(self._watch())
                    continue
                self._deliver(frame)
                self._num_read += 1
                self._num_pieces_read += len(frame.pieces)
                if self._has_read_much():
                    self._flush_soon()
        except grpc.aio.AioRpcError as failure:
            error = to_error(failure, peer_epoch=self._peer_epoch)
            if isinstance(error, InternalError) and not is_servers_word(failure):
                # The library's name for a stream that broke while something was written.
                error = Disconnected(error.message, failed_epoch=self._peer_epoch)
        except Exception:
            log.exception("session ended by an unexpected exception")
            error = Unavailable("internal error", failed_epoch=self._peer_epoch)
        finally:
            self._stream.cancel()  # of use only where what was read ended it
            if self._watching is not None:
                self._watching.cancel()
            self._end_all(error)

    async def _watch(self) -> None:
        """Ends the session when its server is stuck; but what this process, held up itself, has not
        read is no silence."""
        loop = asyncio.get_running_loop()
        while self._silent_seconds < SILENCE_SECONDS:
            before = loop.time()
            await asyncio.sleep(LOOK_SECONDS)
            self._silent_seconds += min(loop.time() - before, 2 * LOOK_SECONDS)
        reason = f"the server has said nothing for {SILENCE_SECONDS:g} s"
        self._end_all(Disconnected(reason, failed_epoch=self._peer_epoch))
        self._stream.cancel()

    def _has_read_much(self) -> bool:
        is_much = self._num_read >= READ_FRAMES and self._num_pieces_read >= READ_PIECES
        return is_much or self._num_read >= READ_SMALL_FRAMES

    def _end_all(self, error: EpserveError) -> None:
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(error)

    def _deliver(self, frame: ServerFrame) -> None:
        calls = self._calls
        for piece in frame.pieces:
            call = calls.get(piece.call)
            if call is None:  # left a moment ago
                continue
            if piece.responses:
                call.feed(piece.responses)
            if piece.HasField("end"):
                calls.pop(piece.call, None)
                call.end(_meant(piece.end))


def _meant(end: CallEnd) -> EpserveError | None:
    if end.code == "OK":
        return None
    has_delay = end.HasField("retry_after_seconds")
    return EpserveError.from_status(
        end.code,
        end.message,
        code=end.error_code,
        param=end.error_param or None,
        retry_after_seconds=end.retry_after_seconds if has_delay else None,
        failed_epoch=end.failed_epoch,
    )
