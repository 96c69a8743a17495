"""The word that calls between processes of a cluster carry.

token = ClusterToken(settings.cluster_token_file)
metadata = token.metadata()                             # of a call
grpc.aio.server(interceptors=[TokenInterceptor(token)])     # who does not carry it is refused
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from core.token_file import read_tokens
from core.watched_files import WatchedFiles
from rpc.interceptor import Context, Details, Handler

TOKEN_KEY = "x-epserve-cluster-token"
# Probes of orchestrators carry no token; all that they learn is that the process serves.
OPEN_SERVICE = f"/{health.SERVICE_NAME}/"


class ClusterToken:
    """The words in a file, one a line, read again when it changes: the first is sent, all are
    taken, so that a word can be replaced while processes run. Raises ValueError."""

    def __init__(self, file: Path) -> None:
        self._words = WatchedFiles("cluster token", (file,), partial(read_tokens, file))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self._words.current()[0]),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the one word that a call carries is right; takes as long for a wrong one."""
        given = [value for key, value in metadata if key == TOKEN_KEY]
        if len(given) != 1 or not isinstance(given[0], str):
            return False
        word = given[0].encode()
        return sum(hmac.compare_digest(word, own.encode()) for own in self._words.current()) > 0


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses all calls without the token, but for those that ask for health."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        is_open = handler_call_details.method.startswith(OPEN_SERVICE)
        if is_open or self._token.is_in(handler_call_details.invocation_metadata or ()):
            return await continuation(handler_call_details)
        # For calls of any kind: no request is read.
        return grpc.stream_unary_rpc_method_handler(_refuse)


async def _refuse(_requests: AsyncIterator[Any], context: Context) -> None:
    # Without an `error-code`: no word for clients. To who calls, this peer is not there.
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call does not carry the cluster's token (--cluster-token-file)",
    )
