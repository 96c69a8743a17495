"""Whether a file is still the one that was read."""

from pathlib import Path

FileVersion = tuple[int, int, int]


def file_version(file: Path) -> FileVersion | None:
    """Changes when the file is written or replaced, when a link to it is turned, and when who may
    read it changes; None: it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size
