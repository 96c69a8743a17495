"""ASGI middleware: bodies in forms that are not taken, refused before they are read."""

from collections.abc import Awaitable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.base.openai_error import http_error_response

# What a page from anywhere may have a browser send without asking first (the Fetch standard's
# "simple" requests, "" for those that name no type).
UNASKED_TYPES = frozenset(
    {"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"}
)


class BodyForm:
    """Answers 415 to content encodings, none of which is decoded, and to POSTs that browsers
    send unasked for pages of other sites than `origins` ("*": any), unless `takes_unasked`."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str], takes_unasked: bool) -> None:
        self._app = app
        self._origins = origins
        self._takes_unasked = takes_unasked or "*" in origins

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] != "POST":
            return self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if {one.lower() for one in headers.getlist("content-encoding")} - {"identity"}:
            text = "content encodings are not decoded here: send the body as it is"
            return _unsupported(text, {"accept-encoding": "identity"})(scope, receive, send)
        if not self._takes_unasked and self._is_unasked(headers):
            text = "pages of other sites must send application/json"
            return _unsupported(text, {"accept": "application/json"})(scope, receive, send)
        return self._app(scope, receive, send)

    def _is_unasked(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None and headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return False
        if origin in self._origins or (origin or "").partition("://")[2] == headers.get("host"):
            return False
        return headers.get("content-type", "").partition(";")[0].strip().lower() in UNASKED_TYPES


def _unsupported(text: str, headers: dict[str, str]) -> ASGIApp:
    return http_error_response(415, text, {"connection": "close"} | headers)
