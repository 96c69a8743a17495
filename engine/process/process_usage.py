"""CPU time and memory of another process, as Linux tells them."""

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# After the closing parenthesis of the name: places of utime, stime and rss in `proc(5)`.
_UTIME, _STIME, _RSS = 11, 12, 21


class ProcessUsage(NamedTuple):
    cpu_seconds: float
    resident_bytes: int


def usage_of(pid: int) -> ProcessUsage | None:
    """None for a process that is gone, and on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessUsage(
        cpu_seconds=(int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS,
        resident_bytes=int(fields[_RSS]) * _PAGE_BYTES,
    )
