"""What is read from files, and read again when one of them changes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from core.log import get_logger

log = get_logger("core.watched_files")

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """`read` makes one value of all `files`, and raises ValueError when it cannot: at first for
    the caller; later on, as while one of several files is written, the last value stays."""

    def __init__(self, what: str, files: Sequence[Path], read: Callable[[], Content]) -> None:
        self._what = what
        self._files = files
        self._read = read
        self._seen = self._versions()
        self._content = read()

    def current(self) -> Content:
        """Of the files as they are now: one look at each, and the same object while none has
        changed."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            try:
                self._content = self._read()
            except ValueError as error:
                log.error(f"{self._what} stays as it was", reason=str(error))
            else:
                log.info(f"{self._what} read again", file=str(self._files[0]))
        return self._content

    def _versions(self) -> list[object]:
        return [file_version(file) for file in self._files]


def file_version(file: Path) -> tuple[int, int, int] | None:
    """Changes when the file is written or replaced, when a link to it is turned, and when who may
    read it changes; None: it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size
