"""ASGI middleware: API keys and rate limits, before anything of a body is read."""

from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import RateLimited
from core.log import get_logger
from gateway.base.metrics import GENERATION_PATHS, GatewayMetrics
from gateway.base.openai_error import error_response, http_error_response
from gateway.limits.api_keys import ApiKeys, Client
from gateway.limits.rate_limit import RateLimiter

log = get_logger("gateway.key_guard")

# For probes and scrapers; they tell nothing about requests.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
CLIENT = "epserve.client"
CHALLENGE = {"www-authenticate": "Bearer"}


class KeyGuard:
    """Answers 401 without a known key and 429 to those past their limits; puts the client
    into the scope and the state of its limits on each response."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        limiter: RateLimiter,
        metrics: GatewayMetrics,
        *,
        guards_all: bool,
    ) -> None:
        """`guards_all`: the paths of operation ask for a key as well."""
        self._app = app
        self._keys = keys
        self._limiter = limiter
        self._metrics = metrics
        self._open_paths = frozenset() if guards_all else OPEN_PATHS

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            return self._app(scope, receive, send)
        client = self._find(Headers(scope=scope))
        if client is None:
            text = (
                "Incorrect API key provided, or none: send `Authorization: Bearer KEY`, or "
                "`x-api-key: KEY`."
            )
            return http_error_response(401, text, CHALLENGE)(scope, receive, send)
        scope[CLIENT] = client
        if not any(client.limits) or scope["method"] != "POST":
            return self._app(scope, receive, send)
        sender = self._with_limits(client, send)
        try:
            self._limiter.take_request(client.name, client.limits)
        except RateLimited as error:
            log.info("rate limit reached", client=client.name)
            if scope["path"] in GENERATION_PATHS:
                self._metrics.count_refusal(error.status.code)
            return error_response(error)(scope, receive, sender)
        return self._app(scope, receive, sender)

    def _find(self, headers: Headers) -> Client | None:
        """Anthropic's clients send `x-api-key`; some send both, of which one may be known."""
        bearers = (headers.get("authorization", ""), f"Bearer {headers.get('x-api-key', '')}")
        return next(filter(None, map(self._keys.find, bearers)), None)

    def _with_limits(self, client: Client, send: Send) -> Send:
        def send_with_limits(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.raw.extend(self._limiter.headers(client.name, client.limits))
            return send(message)

        return send_with_limits
