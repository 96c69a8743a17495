"""The secret that operators' calls carry, where one is configured.

token = AdminToken(settings.admin_token_file)
token.check(context)                    # first thing in a guarded method
stub.Drain(request, metadata=passed_on(context))    # the same call, one process further
"""

import hmac
from pathlib import Path
from typing import Any

import grpc

from core.errors import Unauthenticated
from core.file_version import FileVersion, file_version
from core.log import get_logger
from core.token_file import read_token

log = get_logger("rpc.admin_token")

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
        self._file = file
        self._seen: FileVersion | None = None
        self._token = b""
        if file is not None:
            self._seen = file_version(file)
            self._token = read_token(file).encode()

    def check(self, context: Context) -> None:
        """Raises Unauthenticated when the call does not carry the token."""
        if self._file is None:
            return
        self._reread(self._file)
        given = next((value for _key, value in passed_on(context)), "")
        if not given:
            raise Unauthenticated("an admin token is needed here")
        if not hmac.compare_digest(given.encode(), _SCHEME.encode() + self._token):
            raise Unauthenticated("the admin token is wrong")

    def _reread(self, file: Path) -> None:
        seen = file_version(file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._token = read_token(file).encode()
        except ValueError as error:
            log.error("admin token stays as it was", reason=str(error))
        else:
            log.info("admin token read again", file=str(file))
