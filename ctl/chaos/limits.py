"""Limits of other processes of this user, lowered for a while: what they can open and write."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def no_new_descriptors(pid: int) -> Iterator[None]:
    """Raises OSError when the process is gone."""
    numbers = [int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()]
    with _limited(pid, resource.RLIMIT_NOFILE, _first_gap(numbers)):
        yield


@contextmanager
def no_writes(pid: int) -> Iterator[None]:
    """Writes to files fail (with EFBIG, as nobody but root can fill a disk for one process); pipes
    and sockets are as ever. Raises OSError when the process is gone."""
    with _limited(pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def _limited(pid: int, limit: int, value: int) -> Iterator[None]:
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, limit, before)


def _first_gap(numbers: list[int]) -> int:
    """The lowest number that is not in use: what is opened next would get it."""
    return next(number for number in range(len(numbers) + 1) if number not in numbers)
