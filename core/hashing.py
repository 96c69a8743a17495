"""Hashes of prompt prefixes, equal in every process and on every machine.

    hash[i] = blake2b-64(hash[i - 1] || tokens of page i as little-endian uint32)
    hash[-1] = blake2b-64("epserve prefix" || page_tokens as little-endian uint32)

so that hash[i] covers tokens [0, (i + 1) * page_tokens).
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 8


def prefix_hashes(token_ids: Sequence[int], page_tokens: int) -> list[int]:
    """Chained unsigned 64-bit hashes, one for each full page of `token_ids`.

    Raises ValueError for a page size below 1 and for ids outside [0, 2**32).
    """
    if page_tokens < 1:
        raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
    num_pages = len(token_ids) // page_tokens
    try:
        packed = struct.pack(f"<{num_pages * page_tokens}I", *token_ids[: num_pages * page_tokens])
    except struct.error as error:
        raise ValueError(f"token ids must be unsigned 32-bit integers: {error}") from error
    digest = _digest(b"epserve prefix" + struct.pack("<I", page_tokens))
    page_bytes = 4 * page_tokens
    hashes = []
    for start in range(0, len(packed), page_bytes):
        digest = _digest(digest + packed[start : start + page_bytes])
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()
