"""What two workers must have in common, beside their KV, to work on one request together."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# To be raised whenever a worker cannot be paired with one from before: the calls between prefill
# and decode, the notices of a transfer, the descriptors of its agents, or which token a seed draws
# at a position mean something else. What only adds, with what was always so as its default, leaves
# it as it is.
PAIRING_VERSION = 2


@cache
def pairing_version() -> str:
    """Equal for workers that may be paired: our own version, and that of the library that moves
    their KV, which promises nothing to agents of other versions."""
    try:
        library = version("nixl")
    except PackageNotFoundError:
        library = "none"
    return f"{PAIRING_VERSION}+nixl-{library}"
