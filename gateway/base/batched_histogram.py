"""A Prometheus histogram that sorts what it has observed many at a time.

The library takes locks and looks through the buckets for each number, which costs as much as the
text of a token. Here a number is put aside until there are some, or somebody looks.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

MAX_WAITING = 64


class BatchedHistogram(Histogram):
    """Without labels, in a process that is asked for its numbers itself."""

    def __init__(
        self, name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._waiting: deque[float] = deque()
        super().__init__(name, text, buckets=buckets, registry=registry)

    def observe(self, amount: float, exemplar: Any = None) -> None:  # noqa: ANN401 - see base
        self._waiting.append(amount)
        if len(self._waiting) >= MAX_WAITING:
            self._sort()

    def _child_samples(self) -> Iterable[Sample]:
        self._sort()
        return super()._child_samples()

    def _sort(self) -> None:
        counts: Counter[int] = Counter()
        total = 0.0
        # Somebody in another thread may look at the same time: each number is taken once.
        with suppress(IndexError):
            while True:
                amount = self._waiting.popleft()
                counts[bisect_left(self._upper_bounds, amount)] += 1
                total += amount
        for index, count in counts.items():
            self._buckets[index].inc(count)
        self._sum.inc(total)
