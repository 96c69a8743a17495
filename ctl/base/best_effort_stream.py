"""A text stream whose reader may leave: what cannot be written any more is lost."""

from contextlib import suppress
from typing import IO, Any, cast


class _BestEffortStream:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)


def best_effort(stream: IO[str]) -> IO[str]:
    """The same stream; neither a full disk, nor a closed pipe or terminal, raises OSError."""
    return cast("IO[str]", _BestEffortStream(stream))
