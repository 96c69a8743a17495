"""ASGI: the endpoints that generate, past the framework.

The framework's layers (routing by patterns, dependencies, exit stacks, telemetry) cost a tenth of
a request and do nothing for endpoints that read bodies and write responses by themselves. Its
routes stay, for the document and for methods other than POST.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import EpserveError
from gateway.openai_error import on_epserve_error, on_http_exception
from gateway.turns import Turns

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """POST to one of `endpoints` goes straight there, everything else to `app`."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        # What is under way needs less time to its next token than a new prompt: it goes first.
        await asyncio.sleep(0)
        await self._turns.wait()
        request = Request(scope, receive)
        # Both kinds are raised before the first byte only.
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
            return
        except EpserveError as error:
            refusal = await on_epserve_error(request, error)
        except HTTPException as error:
            refusal = await on_http_exception(request, error)
        await refusal(scope, receive, send)
