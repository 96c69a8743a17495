"""OpenAI's error object, for our own errors and for those of the framework. Under the paths of
Anthropic's API it becomes that API's.

{"error": {"message": ..., "type": ..., "param": ... or null, "code": ...}}
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from core.errors import EpserveError
from core.log import get_logger
from gateway.base.anthropic_error import anthropic_error, is_anthropic

log = get_logger("gateway.openai_error")

# Codes of errors that only HTTP knows.
HTTP_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class ErrorResponse(Response):
    """In the form of the API whose path was asked for."""

    def __init__(
        self, status: int, message: str, body: bytes, headers: Mapping[str, str] | None
    ) -> None:
        """`body` is OpenAI's object."""
        super().__init__(body, status, headers, "application/json")
        self._message = message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope["path"]):
            self.body = anthropic_error(self.status_code, self._message)
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_object(message: str, type_: str, param: str | None, code: str) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": type_, "param": param, "code": code}}
    )


def error_body(error: EpserveError) -> bytes:
    """The object for one of our errors; also the payload of an error event in a stream."""
    return error_object(error.message, error.status.type, error.param, error.status.code)


def error_response(error: EpserveError) -> Response:
    """With Retry-After (whole seconds) where coming back later makes sense."""
    headers = {}
    if error.status.http in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds or 1)))
    return ErrorResponse(error.status.http, error.message, error_body(error), headers)


def http_error_response(
    status: int, message: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """For what went wrong before or beside our own code, by HTTP status."""
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    code = HTTP_CODES.get(status, "internal" if status >= 500 else "invalid_value")
    message = message or HTTPStatus(status).phrase
    return ErrorResponse(status, message, error_object(message, type_, None, code), headers)


async def on_epserve_error(request: Request, error: Exception) -> Response:
    """Handler of our own errors."""
    assert isinstance(error, EpserveError)
    if error.status.http >= 500:
        log.warning("request failed", code=error.status.code, message=error.message)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of the framework's: unknown paths, wrong methods, bodies too large."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed here"
    else:
        message = error.detail
    return http_error_response(error.status_code, message, error.headers)
