"""ASGI: the endpoints that generate, past the framework.

The framework's layers cost 7 % of a request's CPU and do nothing for endpoints that read bodies and
write responses by themselves. Its routes stay, for the document and for methods other than POST.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import Cancelled, EpserveError
from gateway.base.metrics import GatewayMetrics
from gateway.base.openai_error import on_epserve_error, on_http_exception
from gateway.http.start_pacer import StartPacer

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """POST to one of `endpoints` goes straight there, everything else to `app`: HEAD, which the
    framework does not know, as GET. The server leaves the body out."""

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], metrics: GatewayMetrics
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._metrics = metrics
        self._pacer = StartPacer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            if scope["type"] == "http" and scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, send)
            return
        # What is under way needs less time to its next token than a new prompt: it goes first.
        await asyncio.sleep(0)
        await self._pacer.wait()
        request = Request(scope, receive)
        # Both kinds are raised before the first byte only.
        try:
            response = await self._response(endpoint, request)
            await response(scope, receive, send)
            return
        except EpserveError as error:
            refusal = await on_epserve_error(request, error)
            # Its frames know it, as errors are passed on: a request would wait for the collector.
            error.__traceback__ = None
        except HTTPException as error:
            refusal = await on_http_exception(request, error)
        await refusal(scope, receive, send)

    async def _response(self, endpoint: Endpoint, request: Request) -> Response:
        """Counts what is refused here; a response counts by itself how it ends."""
        try:
            return await endpoint(request)
        except HTTPException:  # 408 and 413, which are counted as responses
            raise
        except Cancelled:  # while its body was read
            self._metrics.count_refusal("disconnected")
            raise
        except EpserveError as error:
            self._metrics.count_refusal(error.status.code)
            raise
        except Exception:
            self._metrics.count_refusal("internal")
            raise
