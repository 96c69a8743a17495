"""What happens around every call on a server: request id, trace, errors, counting."""

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from core import tracing
from core.errors import EpserveError, InternalError, InvalidRequest, Unavailable
from core.log import REQUEST_ID, get_logger
from core.trace_context import TRACE, TRACEPARENT_KEY, TRACESTATE_KEY, parse_trace
from rpc.status import header_text, to_error, to_status

REQUEST_ID_KEY = "x-request-id"

log = get_logger("rpc.server")

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Details = grpc.HandlerCallDetails
Reader = Callable[[bytes], object]

_END = object()


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns exceptions into statuses and counts the calls in progress.

    EpserveError becomes its status with trailers, a failed call to another server what that
    server meant, anything else INTERNAL without detail (the log has it): never UNKNOWN.
    Streams whose method is named Watch... never end by themselves: they are not counted, and
    end with UNAVAILABLE once `end_watches` is set.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.end_watches = asyncio.Event()

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method
            return cast("Handler", handler)
        method: str = handler_call_details.method
        # Requests are read here: grpc would say INTERNAL, with a traceback, to what is no message.
        read = partial(read_message, handler.request_deserializer)
        write = handler.response_serializer
        if handler.request_streaming:
            call = _requests_read(read, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, None, write)
        if not handler.response_streaming:
            call = self._unary(method, _request_read(read, handler.unary_unary))
            return grpc.unary_unary_rpc_method_handler(call, None, write)
        stream = handler.unary_stream
        if method.rpartition("/")[2].startswith("Watch"):
            call = self._watch(method, stream, read)
        else:
            call = self._stream(method, _request_read(read, stream))
        return grpc.unary_stream_rpc_method_handler(call, None, write)

    def _unary(self, method: str, behaviour: Any) -> Any:  # noqa: ANN401 - untyped in grpc
        async def call(request: object, context: Context) -> object:
            _take_ids(context)
            end = self.enter(method)
            try:
                response = await behaviour(request, context)
                end.code = "OK"
                return response
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing may pass as UNKNOWN
                await context.abort(*to_status(end.fail(error)))
            finally:
                self.leave(end)

        return call

    def _stream(self, method: str, behaviour: Any) -> Any:  # noqa: ANN401 - untyped in grpc
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            _take_ids(context)
            end = self.enter(method)
            try:
                async for response in behaviour(request, context):
                    yield response
                end.code = "OK"
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing may pass as UNKNOWN
                await context.abort(*to_status(end.fail(error)))
            finally:
                self.leave(end)

        return call

    def _watch(self, method: str, behaviour: Any, read: Reader) -> Any:  # noqa: ANN401 - untyped in grpc
        async def responses(data: bytes, context: Context) -> AsyncGenerator[object, None]:
            request = read(data)
            if not inspect.isasyncgenfunction(behaviour):
                # Writes to the context instead of yielding: the standard health service.
                await self._unless_ended(behaviour(request, context))
                return
            async with aclosing(behaviour(request, context)) as stream:
                while (response := await self._unless_ended(anext(stream, _END))) is not _END:
                    yield response

        async def call(data: bytes, context: Context) -> AsyncIterator[object]:
            _take_ids(context)
            try:
                async with aclosing(responses(data, context)) as stream:
                    async for response in stream:
                        yield response
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing may pass as UNKNOWN
                await context.abort(*to_status(meant(error, method)))

        return call

    async def _unless_ended(self, response: Awaitable[object]) -> object:
        """Awaits one response of an endless stream; raises Unavailable when it is to end."""
        waiting = asyncio.ensure_future(response)
        ended = asyncio.ensure_future(self.end_watches.wait())
        try:
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Unavailable("server is stopping")
            return waiting.result()
        finally:
            waiting.cancel()
            ended.cancel()
            await asyncio.gather(waiting, ended, return_exceptions=True)

    def enter(self, method: str) -> "CallRecord":
        """A call begins; give the result back to `leave`."""
        self.num_running += 1
        self.idle.clear()
        return CallRecord(method)

    def leave(self, call: "CallRecord") -> None:
        """A call has ended."""
        self.num_running -= 1
        if self.num_running == 0:
            self.idle.set()
        call.log_end()


class CallRecord:
    """One call as the log tells of it; `code` is the name of the status it ends with."""

    def __init__(self, method: str) -> None:
        self.code = "CANCELLED"  # what it is unless something else is said
        self._method = method
        self._reason = ""
        self._started_at = time.monotonic()
        self._span = tracing.NOTHING
        if TRACE.get() is not None and tracing.is_on():
            service, _, name = method[1:].rpartition("/")
            attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
            self._span = tracing.begin(method[1:], tracing.Kind.SERVER, attributes)
            TRACE.set(self._span.context)

    def fail(self, error: Exception) -> EpserveError:
        """What the caller is told of `error`, which ended the call."""
        told = meant(error, self._method)
        self.code = told.status.grpc
        # As in the gateway: of what is the client's fault the code says enough.
        self._reason = told.message if told.status.http >= 500 else ""
        return told

    def log_end(self) -> None:
        """A line with the request's id, and the end of its span; calls that belong to no request
        have neither."""
        if self._span.is_recording:
            self._span.note({"rpc.response.status_code": self.code})
        self._span.end("" if self.code == "OK" else self.code.lower())
        if REQUEST_ID.get():
            seconds = round(time.monotonic() - self._started_at, 6)
            why = {"reason": self._reason} if self._reason else {}
            log.info("call ended", method=self._method, code=self.code, seconds=seconds, **why)


def read_message(deserializer: Reader, data: bytes) -> Any:  # noqa: ANN401 - a method's own type
    """Raises InvalidRequest for bytes that are none."""
    try:
        return deserializer(data)
    except DecodeError as error:
        raise InvalidRequest("the request is no message of this method") from error


def _request_read(read: Reader, behaviour: Any) -> Any:  # noqa: ANN401 - untyped in grpc
    return lambda data, context: behaviour(read(data), context)


def _requests_read(read: Reader, behaviour: Any) -> Any:  # noqa: ANN401 - untyped in grpc
    async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[object]:
        failed: list[EpserveError] = []

        async def messages() -> AsyncIterator[object]:
            async for data in requests:
                try:
                    yield read(data)
                except InvalidRequest as error:
                    failed.append(error)
                    return

        async with aclosing(behaviour(messages(), context)) as responses:
            async for response in responses:
                yield response
        if failed:
            await context.abort(*to_status(failed[0]))

    return call


def _take_ids(context: Context) -> None:
    # Each call runs in a task, and so a context, of its own: nothing to reset.
    traceparent = tracestate = ""
    for key, value in context.invocation_metadata() or ():
        if not isinstance(value, str):
            continue
        if key == REQUEST_ID_KEY:
            REQUEST_ID.set(header_text(value))
        elif key == TRACEPARENT_KEY:
            traceparent = value
        elif key == TRACESTATE_KEY:
            tracestate = value
    if traceparent:
        TRACE.set(parse_trace(traceparent, tracestate))


def meant(error: Exception, method: str) -> EpserveError:
    """What a caller is told about any exception; the log has those that are defects."""
    if isinstance(error, EpserveError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return to_error(error)
    log.error("call failed unexpectedly", method=method, exc_info=error)
    return InternalError("internal error; the log of this process has the details")
