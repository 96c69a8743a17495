"""How fast requests have been ending lately, and so how long a refused one should stay away."""

from collections import deque

WINDOW_SECONDS = 10.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class Completions:
    """Requests that ended in the last WINDOW_SECONDS; bounded by one entry per status."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque()
        self._num_ended = 0

    def record(self, num_ended: int, now: float) -> None:
        """`num_ended` requests have ended by `now` (monotonic seconds)."""
        if num_ended > 0:
            self._ended.append((now, num_ended))
            self._num_ended += num_ended
        self._drop_old(now)

    def retry_after_seconds(self, num_ahead: int, now: float) -> float:
        """Time until `num_ahead` waiting requests and one more have found room at the recent
        pace, within [MIN_RETRY_SECONDS, MAX_RETRY_SECONDS]; the least when nothing is known."""
        self._drop_old(now)
        if self._num_ended == 0:
            return MIN_RETRY_SECONDS
        # A burst a moment ago must not look like an endless one: at least a second of it.
        span = max(1.0, now - self._ended[0][0])
        seconds = (num_ahead + 1) * span / self._num_ended
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _drop_old(self, now: float) -> None:
        while self._ended and now - self._ended[0][0] > WINDOW_SECONDS:
            self._num_ended -= self._ended.popleft()[1]
