"""The secret that operators' calls carry, where one is configured.

token = AdminToken(settings.admin_token_file)
token.check(context)                    # first thing in a guarded method
stub.Drain(request, metadata=passed_on(context))    # the same call, one process further
"""

import hmac
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from core.errors import Unauthenticated
from core.token_file import read_token
from core.watched_files import WatchedFiles

AUTHORIZATION_KEY = "authorization"
_SCHEME = "Bearer "

Context = grpc.aio.ServicerContext[Any, Any]


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by somebody who knows `token`; none for ""."""
    return ((AUTHORIZATION_KEY, _SCHEME + token),) if token else ()


def passed_on(context: Context) -> tuple[tuple[str, str], ...]:
    """The caller's own authorization, for calls made on its behalf."""
    return tuple(
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key == AUTHORIZATION_KEY and isinstance(value, str)
    )


class AdminToken:
    """The token in a file, read again when the file changes; without a file all may call.

    Raises ValueError when the file cannot be read or holds nothing. Later on the last token
    that could be read stays in force: a door never opens because a file is gone.
    """

    def __init__(self, file: Path | None) -> None:
        self._token = None
        if file is not None:
            self._token = WatchedFiles("admin token", (file,), partial(read_token, file))

    def check(self, context: Context) -> None:
        """Raises Unauthenticated when the call does not carry the token."""
        if self._token is None:
            return
        given = next((value for _key, value in passed_on(context)), "")
        if not given:
            raise Unauthenticated("an admin token is needed here")
        if not hmac.compare_digest(given.encode(), (_SCHEME + self._token.current()).encode()):
            raise Unauthenticated("the admin token is wrong")
