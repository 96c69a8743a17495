"""Token ids as one value: little-endian uint32, one after the other, in `bytes`.

A prompt keeps this form from the tokenizer to the tensors of a batch: messages and links copy it
as it is, and nobody goes over the ids on the way.
"""

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
assert sys.byteorder == "little", "ids and hashes travel as this machine has them in memory"


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for ids outside [0, 2**32)."""
    return array("I", token_ids).tobytes()


def unpack_ids(packed: bytes) -> "memoryview[int]":
    """A view of the ids, without a copy. Raises ValueError for half an id."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of token ids")
    return memoryview(packed).cast("I")


def num_ids(packed: bytes | bytearray) -> int:
    return len(packed) // TOKEN_BYTES
