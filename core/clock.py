"""Time as an argument: whoever needs it takes a `Clock`, so that tests can turn it by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Raises ValueError for a negative step: the clock is monotonic."""
        if seconds < 0:
            raise ValueError(f"cannot turn a monotonic clock back by {-seconds} s")
        self._now += seconds
