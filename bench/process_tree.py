"""What a tree of processes is doing: where each thread of each process is.

They write it themselves, on the signal that `core.log` listens to, into their logs.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from core.log import STACKS_SIGNAL

_PROC = Path("/proc")
_WRITE_SECONDS = 0.05


def descendants(pid: int) -> list[int]:
    """Process ids of the children of `pid`, of theirs, and so on; empty without /proc."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def ask_for_stacks(pid: int) -> None:
    """Of all descendants, one after the other: several may share a log. Those that do not listen
    go on as well."""
    for child in descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(child, STACKS_SIGNAL)
        time.sleep(_WRITE_SECONDS)


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of all there are."""
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            # The name of the program, in brackets, may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            yield int(folder.name), int(fields[1])
