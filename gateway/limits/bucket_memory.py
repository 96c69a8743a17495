"""Levels of token buckets, in memory that the gateway's processes may share.

One slot a key, found by a hash of its name with linear probing; slots are never given back:

    offset  bytes  field
    0       8      hash of the key's name, 0: the slot is free (uint64, little endian)
    8       8      requests left (float64)
    16      8      tokens left (float64)
    24      8      time of these levels on the system's monotonic clock, seconds (float64)
"""

import fcntl
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

SLOT = struct.Struct("<Qddd")
NUM_SLOTS = 16384
NUM_BYTES = NUM_SLOTS * SLOT.size


class Levels(NamedTuple):
    """What is left, and when that was."""

    requests: float
    tokens: float
    at_seconds: float


class BucketMemory:
    """`file` None: memory of this process alone. Raises OSError when it cannot be opened."""

    def __init__(self, file: Path | None = None) -> None:
        self._file: BinaryIO | None = None
        if file is None:
            self._memory = mmap.mmap(-1, NUM_BYTES)
            return
        file.touch()
        self._file = file.open("r+b", buffering=0)
        self._file.truncate(NUM_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), NUM_BYTES)

    def close(self) -> None:
        self._memory.close()
        if self._file is not None:
            self._file.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process reads or writes while the block runs: microseconds, never a wait
        for anything else."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def read(self, key: str) -> Levels | None:
        """None for a key that was never written. Call it with the lock held."""
        offset, is_new = self._slot(_hash(key))
        return None if is_new else Levels(*SLOT.unpack_from(self._memory, offset)[1:])

    def write(self, key: str, levels: Levels) -> None:
        """Call it with the lock held."""
        number = _hash(key)
        offset, _ = self._slot(number)
        SLOT.pack_into(self._memory, offset, number, *levels)

    def _slot(self, number: int) -> tuple[int, bool]:
        """Offset of the slot of a hash, and whether it is free as yet. A full table gives
        another key's: too many keys then share their limits, and nothing fails."""
        for step in range(NUM_SLOTS):
            offset = (number + step) % NUM_SLOTS * SLOT.size
            found = int.from_bytes(self._memory[offset : offset + 8], "little")
            if found in (0, number):
                return offset, found == 0
        return number % NUM_SLOTS * SLOT.size, False


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1
