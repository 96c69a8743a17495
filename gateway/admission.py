"""Which requests may run: at most so many at once, and none new while the process stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from core.errors import EpserveError, Overloaded, Unavailable
from gateway.metrics import GatewayMetrics

# How long clients may take to read the error that ends their stream.
LAST_WORDS_SECONDS = 0.3


class Stoppable(Protocol):
    def stop(self, error: EpserveError) -> None:
        """Ends early with `error`."""
        ...


class Admission:
    """Counts the requests in progress."""

    def __init__(self, *, max_inflight: int, metrics: GatewayMetrics) -> None:
        self.is_draining = False
        self._max_inflight = max_inflight
        self._metrics = metrics
        self._running: set[Stoppable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        return len(self._running)

    def check(self) -> None:
        """Raises Unavailable while stopping and Overloaded when there is no room."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down")
        if len(self._running) >= self._max_inflight:
            raise Overloaded(f"{self._max_inflight} requests are running already")

    @contextmanager
    def slot(self, run: Stoppable) -> Iterator[None]:
        """Room for `run` while the block runs; raises as `check` does."""
        self.check()
        self._running.add(run)
        self._idle.clear()
        self._metrics.inflight.inc()
        try:
            yield
        finally:
            self._running.discard(run)
            self._metrics.inflight.dec()
            if not self._running:
                self._idle.set()

    async def drain(self, grace_seconds: float) -> None:
        """Admits nothing more; what runs may finish within `grace_seconds`, then is told that
        the gateway stops."""
        self.is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        for run in list(self._running):
            run.stop(Unavailable("the gateway is shutting down"))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_WORDS_SECONDS)
