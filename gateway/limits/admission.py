"""Which requests may run: so many at once, so many waiting, none new while the process stops."""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from core import tracing
from core.clock import Clock
from core.errors import EpserveError, Overloaded, Unavailable
from gateway.base.metrics import GatewayMetrics

# How long clients may take to read the error that ends their stream.
LAST_WORDS_SECONDS = 0.3
# What one more observation weighs in the time between two ends while others wait.
NEW_WEIGHT = 0.1
LONGEST_RETRY_SECONDS = 60.0


class Stoppable(Protocol):
    def stop(self, error: EpserveError) -> None:
        """Ends early with `error`."""
        ...


@dataclass(order=True, slots=True)
class _Waiting:
    """Ordered as they are let in: higher priorities first, then in order of arrival."""

    minus_priority: int
    number: int
    admitted: "asyncio.Future[None]" = field(compare=False)


class Admission:
    """Counts the requests in progress, and keeps those beyond `max_inflight` waiting: at most
    `max_queued`, none for longer than `max_queue_seconds`."""

    def __init__(
        self,
        *,
        max_inflight: int,
        max_queued: int,
        max_queue_seconds: float,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self.is_draining = False
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._max_queue_seconds = max_queue_seconds
        self._metrics = metrics
        self._clock = clock
        self._running: set[Stoppable] = set()
        # Places given to requests that have not woken up yet count as taken.
        self._num_promised = 0
        self._queue: list[_Waiting] = []
        self._num_arrived = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended_at: float | None = None  # the last one, if others waited for it
        self._seconds_between_ends: float | None = None

    @property
    def num_inflight(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def check(self) -> None:
        """Raises Unavailable while stopping and Overloaded when there is no room, not even to
        wait."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down")
        if self._is_full() and len(self._queue) >= self._max_queued:
            raise self._overloaded(
                f"{self._max_inflight} requests are running and {len(self._queue)} waiting already"
            )

    @asynccontextmanager
    async def slot(self, run: Stoppable, priority: int = 0) -> AsyncIterator[None]:
        """Room for `run` while the block runs, once there is any. Raises as `check` does, and
        Overloaded when the wait takes too long."""
        self.check()
        arrived_at = self._clock.now()
        if self._is_full():
            await self._wait(priority)
        self._metrics.admission_time.observe(self._clock.now() - arrived_at)
        self._running.add(run)
        self._idle.clear()
        self._metrics.inflight.inc()
        try:
            yield
        finally:
            self._running.discard(run)
            self._metrics.inflight.dec()
            self._note_end()
            self._admit_next()

    async def drain(self, grace_seconds: float) -> None:
        """Admits nothing more; what runs may finish within `grace_seconds`, then is told that
        the gateway stops."""
        self.is_draining = True
        for waiting in self._queue:
            if not waiting.admitted.done():
                waiting.admitted.set_exception(Unavailable("the gateway is shutting down"))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        for run in list(self._running):
            run.stop(Unavailable("the gateway is shutting down"))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_WORDS_SECONDS)

    def _is_full(self) -> bool:
        # Who waits is not overtaken by who has just come.
        taken = len(self._running) + self._num_promised
        return taken >= self._max_inflight or bool(self._queue)

    async def _wait(self, priority: int) -> None:
        self._num_arrived += 1
        admitted = asyncio.get_running_loop().create_future()
        span = tracing.begin("wait for room")
        waiting = _Waiting(-priority, self._num_arrived, admitted)
        insort(self._queue, waiting)
        self._metrics.queued.set(len(self._queue))
        try:
            async with asyncio.timeout(self._max_queue_seconds):
                await admitted
        except TimeoutError:
            if not _has_place(admitted):
                raise self._overloaded(f"no room within {self._max_queue_seconds:g} s") from None
        finally:
            span.end()
            if _has_place(admitted):
                self._num_promised -= 1
            else:
                self._queue.remove(waiting)
            self._metrics.queued.set(len(self._queue))
            # Cancelled, perhaps, with a place in hand: it goes to the next one.
            asyncio.get_running_loop().call_soon(self._admit_next)

    def _admit_next(self) -> None:
        while len(self._running) + self._num_promised < self._max_inflight:
            # Those that are done give up at this moment.
            waiting = next((one for one in self._queue if not one.admitted.done()), None)
            if waiting is None:
                break
            self._queue.remove(waiting)
            self._num_promised += 1
            waiting.admitted.set_result(None)
        if not self._running and not self._num_promised:
            self._idle.set()

    def _note_end(self) -> None:
        """An end while no request waits says nothing about how fast the queue moves."""
        now = self._clock.now()
        if self._ended_at is not None:
            seconds, before = now - self._ended_at, self._seconds_between_ends
            self._seconds_between_ends = (
                seconds if before is None else before + NEW_WEIGHT * (seconds - before)
            )
        self._ended_at = now if self._queue else None

    def _overloaded(self, why: str) -> Overloaded:
        """With the time that the queue, and one more, would take at the pace of late; the least
        when none is known."""
        seconds = (self._seconds_between_ends or 0.0) * (len(self._queue) + 1)
        return Overloaded(
            f"the gateway is full: {why}",
            retry_after_seconds=min(max(1.0, seconds), LONGEST_RETRY_SECONDS),
        )


def _has_place(admitted: "asyncio.Future[None]") -> bool:
    return admitted.done() and not admitted.cancelled() and admitted.exception() is None
