"""The logs of a cluster's processes: one each, of bounded size.

    NAME.log      what the process has said of late
    NAME.log.1    what it said before that; NAME.log.2 is older, and so on

A process has its log open, and keeps it: a log that is full is copied and emptied. What is said
between the two, which is microseconds, is lost.
"""

import asyncio
import shutil
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_LOOK_SECONDS = 1.0


def log_path(folder: Path, name: str) -> Path:
    """The file that a process's output goes to."""
    return folder / f"{name}.log"


class LogFiles:
    """In `folder`; a log of more than `max_bytes` becomes the first of `num_earlier`."""

    def __init__(
        self, folder: Path, names: Iterable[str], *, max_bytes: int, num_earlier: int
    ) -> None:
        self.folder = folder
        self._names = tuple(names)
        self._max_bytes = max_bytes
        self._num_earlier = num_earlier

    def path(self, name: str) -> Path:
        return log_path(self.folder, name)

    def begin(self) -> None:
        """All are empty, and of an earlier cluster nothing is left. Raises OSError."""
        for name in self._names:
            self.path(name).write_bytes(b"")
            for earlier in self.folder.glob(f"{name}.log.[0-9]*"):
                earlier.unlink()

    async def keep_small(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.rotate)

    def rotate(self) -> None:
        """Looks at all of them once; to be called in any thread, but in one only."""
        for name in self._names:
            log = self.path(name)
            with suppress(OSError):  # it may have been tidied up
                if log.stat().st_size > self._max_bytes:
                    self._shift(log)

    def _shift(self, log: Path) -> None:
        earlier = [Path(f"{log}.{number}") for number in range(1, self._num_earlier + 1)]
        for newer, older in reversed([*pairwise(earlier)]):
            with suppress(FileNotFoundError):
                newer.replace(older)
        with log.open("r+b") as full:
            for latest in earlier[:1]:
                try:
                    with latest.open("wb") as copy:
                        shutil.copyfileobj(full, copy)
                except OSError:  # no room, of which the log is not to take more
                    latest.unlink(missing_ok=True)
            full.truncate(0)
