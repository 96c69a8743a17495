"""The load of experts over the last while, from totals that only ever grow."""

from collections import deque

import numpy as np

from ep.eplb.balancedness import Load


class LoadWindows:
    """`window_seconds` back is where a window begins; snapshots between are kept NUM_PARTS to a
    window."""

    NUM_PARTS = 4

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._snapshots: deque[tuple[float, Load]] = deque()

    @property
    def interval_seconds(self) -> float:
        """How often `add` is to be called, at least."""
        return self._window_seconds / self.NUM_PARTS

    def add(self, now: float, totals: Load) -> tuple[float, Load]:
        """Totals [L, E] as of `now` (seconds); (length in seconds, counts) of the window that ends
        here. The first window begins with zeros at the first snapshot."""
        if not self._snapshots:
            self._snapshots.append((now, np.zeros_like(totals)))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - self._window_seconds:
            self._snapshots.popleft()
        began, before = self._snapshots[0]
        if now - self._snapshots[-1][0] >= self.interval_seconds:
            self._snapshots.append((now, totals))
        return now - began, totals - before
