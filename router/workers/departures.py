"""Whether somebody is about to come: workers that leave as planned are mostly replaced.

A worker that drains, or left while it drained, is expected back for `LONGEST_ABSENCE_SECONDS`, at
its own address or another.
"""

from router.workers.table import Transition
from router.workers.worker import WorkerState

LONGEST_ABSENCE_SECONDS = 60.0


class Departures:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._left_at: dict[str, float] = {}  # by address

    def note(self, transition: Transition, now: float) -> None:
        """A worker has changed its state."""
        address = transition.worker.address
        match transition.after:
            case WorkerState.DRAINING:
                self._left_at[address] = now
            case WorkerState.LOST if transition.before is WorkerState.DRAINING:
                self._left_at[address] = now
            case WorkerState.READY:
                self._left_at.pop(address, None)

    def replacement_expected(self, now: float) -> bool:
        """Somebody left as planned, and not too long ago."""
        self._left_at = {
            address: left_at
            for address, left_at in self._left_at.items()
            if now - left_at < LONGEST_ABSENCE_SECONDS
        }
        return bool(self._left_at)
