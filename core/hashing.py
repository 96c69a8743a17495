"""Hashes of prompt prefixes, equal in every process and on every machine.

    hash[i] = blake2b-64(hash[i - 1] || tokens of page i as little-endian uint32)
    hash[-1] = blake2b-64("epserve prefix" || page_tokens as little-endian uint32)

so that hash[i] covers tokens [0, (i + 1) * page_tokens).
"""

import struct
from hashlib import blake2b

from core.token_ids import TOKEN_BYTES

HASH_BYTES = 8


def prefix_hashes(token_ids: bytes, page_tokens: int) -> bytes:
    """`token_ids` as in `core.token_ids` -> chained hashes as little-endian uint64, one for each
    full page.

    Raises ValueError for a page size below 1.
    """
    if page_tokens < 1:
        raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
    page_bytes = TOKEN_BYTES * page_tokens
    digest = _digest(b"epserve prefix" + struct.pack("<I", page_tokens))
    hashes = []
    for start in range(0, len(token_ids) - page_bytes + 1, page_bytes):
        digest = _digest(digest + token_ids[start : start + page_bytes])
        hashes.append(digest)
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError for half a hash."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of hashes")
    return tuple(memoryview(packed).cast("Q"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()
