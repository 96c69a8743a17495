"""How long each phase of a process's start takes, and which one is under way.

clock = StartClock()
with clock.phase("group"):     # a line when it begins, and one when it is over
    ...
clock.seconds()                # (("python", 1.9), ("group", 0.2))
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.log import get_logger

log = get_logger("engine.start_clock")

# After the closing parenthesis of the name: what `proc(5)` calls starttime, in clock ticks.
_STARTTIME = 19


class StartClock:
    """The first phase, "python", goes from the begin of the process to the first import's end:
    to where this object is made. Nothing can be logged before; who starts the process says that it
    begins."""

    def __init__(self) -> None:
        self._seconds = [("python", _process_age_seconds())]
        self._last = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts from the end of the phase before, so that all together are the whole start. One
        that hangs or fails has a line about its begin only."""
        log.info("start phase begins", phase=name)
        yield
        now = time.monotonic()
        self._seconds.append((name, now - self._last))
        log.info("start phase over", phase=name, seconds=round(now - self._last, 2))
        self._last = now

    def seconds(self) -> tuple[tuple[str, float], ...]:
        """Of the phases that are over, in order."""
        return tuple(self._seconds)


def _process_age_seconds() -> float:
    """0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began = int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
