"""Errors about a chat request that was made from another API's body."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from core.errors import InvalidRequest


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """InvalidRequest raised in the block blames the client's own fields: `names` has them by
    regular expressions for those of the chat request."""
    try:
        yield
    except InvalidRequest as error:
        inner = outer = error.param or ""
        for pattern, name in names.items():
            outer = re.sub(pattern, name, outer)
        error.param = outer or None
        error.message = re.sub(f"^{re.escape(inner)}", outer, error.message)
        raise
