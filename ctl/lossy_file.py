"""A text file whose reader may leave: what cannot be written any more is lost."""

from contextlib import suppress
from typing import IO, Any, cast


class _LossyFile:
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the file has
        return getattr(self._file, name)


def lossy(file: IO[str]) -> IO[str]:
    """The same file; neither a full disk, nor a closed pipe or terminal, raises OSError."""
    return cast("IO[str]", _LossyFile(file))
