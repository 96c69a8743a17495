"""The version of this software."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software_version() -> str:
    """As installed; "unknown" for a source tree that was not."""
    try:
        return version("epserve")
    except PackageNotFoundError:
        return "unknown"
