"""Whether a rank's steps take a multiple of what such steps usually take it.

Ranks of an EP group keep step: one that is slow makes all of them so.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

SLOW_FACTOR = 4.0
NUM_RECENT = 16  # steps that are compared with the usual ones
NUM_LEARNT = 64  # steps after which it is known what is usual
NUM_REMEMBERED = 1024  # what goes on for longer than so many steps is usual


class StepPace:
    """Steps of about as many tokens, within a factor of two, are compared with each other."""

    def __init__(self) -> None:
        self._usual: dict[int, tuple[int, float]] = {}  # number and mean seconds, by size
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)  # as multiples of the usual time

    def note(self, seconds: Sequence[float], num_tokens: Sequence[int]) -> None:
        """Steps have ended."""
        for one, size in zip(seconds, map(int.bit_length, num_tokens), strict=True):
            number, mean = self._usual.get(size, (0, 0.0))
            if number >= NUM_LEARNT and mean > 0:
                self._recent.append(one / mean)
            number = min(number + 1, NUM_REMEMBERED)
            self._usual[size] = number, mean + (one - mean) / number

    @property
    def factor(self) -> float:
        """The multiple of the usual time that the last steps took; 1 while too few are known."""
        return median(self._recent) if len(self._recent) == NUM_RECENT else 1.0

    @property
    def is_slow(self) -> bool:
        return self.factor >= SLOW_FACTOR
