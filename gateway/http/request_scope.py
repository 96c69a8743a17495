"""ASGI middleware around everything: request id, access log, and the last word on exceptions."""

import os
import re
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import InternalError
from core.log import get_logger, request_context
from core.trace_context import TRACE
from core.tracing import NOTHING, Span, is_on
from gateway.base.anthropic_error import is_anthropic
from gateway.base.metrics import GatewayMetrics
from gateway.base.openai_error import error_response
from gateway.http.request_trace import begin_request, end_request, trace_of
from gateway.limits.admission import Admission

log = get_logger("gateway.http")

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Asked for all the time by probes and scrapers.
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
CLOSE = (b"connection", b"close")


class RequestScope:
    """Gives each request an id: the client's `x-request-id` when it is safe to repeat, else a new
    one. It is on the response and, as the trace, in every log line and the metadata of every call.
    While the gateway stops, responses close their connections, so that clients try elsewhere.

    NOTE: a plain ASGI middleware; Starlette's BaseHTTPMiddleware loses count of streams
    that clients cancel.
    """

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, paths: frozenset[str], admission: Admission
    ) -> None:
        """`paths` are those that metrics may name; all others count as one."""
        self._app = app
        self._metrics = metrics
        self._admission = admission
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        id_headers = [(b"x-request-id", request_id.encode())]
        if is_anthropic(scope["path"]):
            id_headers.append((b"request-id", request_id.encode()))
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *id_headers]
                if self._admission.is_draining:
                    headers.append(CLOSE)
                message["headers"] = headers
            return send(message)

        started = time.monotonic()
        span = self._begin_span(scope, request_id)
        trace_token = TRACE.set(span.context)
        with request_context(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                log.exception("unexpected exception")
                if status:
                    raise  # the server cuts the connection: the client must not see an end
                response = error_response(InternalError("internal error"))
                await response(scope, receive, send_with_id)
            finally:
                self._record(scope, status, time.monotonic() - started)
                end_request(span, status or 499)
                TRACE.reset(trace_token)

    def _begin_span(self, scope: Scope, request_id: str) -> Span:
        trace = trace_of(scope)
        if not is_on() or scope["path"] in QUIET_PATHS:
            return NOTHING if trace is None else Span(trace)  # passed on all the same
        return begin_request(scope, self._route(scope), request_id, trace)

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path if path in self._paths else "other"

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        # No status: the client went away before there was any.
        self._metrics.count_response(self._route(scope), status or 499)
        if path not in QUIET_PATHS:
            log.info(
                "answered",
                method=scope["method"],
                path=path[:200],
                status=status or 499,
                seconds=round(seconds, 6),
            )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if SAFE_REQUEST_ID.fullmatch(text):
                return text
    return f"req-{os.urandom(12).hex()}"
