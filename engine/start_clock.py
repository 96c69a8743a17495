"""How long each phase of a process's start takes.

clock = StartClock()
...; clock.note("group")       # ends the phase of that name
clock.seconds()                # (("python", 1.9), ("group", 0.2))
"""

import os
import time
from pathlib import Path

from core.log import get_logger

log = get_logger("engine.start_clock")

# Behind the closing parenthesis of the name: what `proc(5)` calls starttime, in clock ticks.
_STARTTIME = 19


class StartClock:
    """The first phase, "python", goes from the begin of the process to the first import's end:
    to where this object is made."""

    def __init__(self) -> None:
        self._seconds = [("python", _process_age_seconds())]
        self._last = time.monotonic()

    def note(self, phase: str) -> None:
        """`phase` is over; logged."""
        now = time.monotonic()
        self._seconds.append((phase, now - self._last))
        log.info("start phase over", phase=phase, seconds=round(now - self._last, 2))
        self._last = now

    def seconds(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._seconds)


def _process_age_seconds() -> float:
    """0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began = int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
