"""Steps that are under way, and the pages that they may still write to.

A step writes the KV of its requests' last tokens. A request may be over, or be preempted, before
that: its pages then stay its own until the last step that it was part of has landed.
"""

from collections import deque
from collections.abc import Sequence

from decode_worker.request import Attempt
from engine.kv.pages import PagePool


class InflightSteps:
    """Steps land in the order in which they were launched."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._inflight_steps: deque[tuple[Attempt | None, ...]] = deque()
        self._given_up: set[str] = set()  # attempts whose pages are free once they have landed

    def __len__(self) -> int:
        return len(self._inflight_steps)

    def launch(self, attempts: Sequence[Attempt | None]) -> None:
        """A step begins; None for a row of no request."""
        for attempt in attempts:
            if attempt is not None:
                attempt.num_in_flight += 1
        self._inflight_steps.append(tuple(attempts))

    @property
    def next_to_land(self) -> tuple[str, ...]:
        """Attempt ids of the oldest step's rows, "" for one of no request."""
        return tuple("" if one is None else one.attempt_id for one in self._inflight_steps[0])

    def land(self) -> tuple[str, ...]:
        """The oldest step is over: its attempt ids, also those that were given up meanwhile."""
        attempt_ids = self.next_to_land
        for attempt in self._inflight_steps.popleft():
            if attempt is None:
                continue
            attempt.num_in_flight -= 1
            if not attempt.num_in_flight and attempt.attempt_id in self._given_up:
                self._given_up.discard(attempt.attempt_id)
                self._pool.free(attempt.attempt_id)
        return attempt_ids

    def give_up(self, attempt: Attempt) -> None:
        """Frees the attempt's pages, as soon as no step writes to them."""
        if attempt.num_in_flight:
            self._given_up.add(attempt.attempt_id)
        else:
            self._pool.free(attempt.attempt_id)
