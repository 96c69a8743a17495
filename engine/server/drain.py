"""How a worker comes to hold nothing that anybody waits for.

    taking --begin--> draining --grace over--> handing over --nothing held--> drained
      ^                  |  `---nothing held-----------------------------------^ |
      `------undo--------+---------------------------------------------------------'

Draining, it refuses new requests. When the grace is over, open ones end so that they are carried
on elsewhere. Drained, no page of it is owned, written to or read from by anybody.
"""

import asyncio

from core.errors import Draining, Unavailable
from core.log import get_logger
from engine.process.front import WorkerFront
from engine.server.worker_service import WorkerService

log = get_logger("engine.drain")


class Drain:
    """`front.draining` says that no request is to be taken. Call `note_change` whenever
    something may have ended."""

    def __init__(self, front: WorkerFront, service: WorkerService) -> None:
        self._front = front
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._is_final = False
        self._drained = asyncio.Event()

    @property
    def is_drained(self) -> bool:
        return self._front.draining and self._service.is_quiet and not self._num_pages_held()

    def begin(self, grace_seconds: float, *, final: bool = False) -> None:
        """Takes nothing new, and hands over what is open `grace_seconds` from now; a later call
        replaces the grace of an earlier one. After a `final` one there is no undoing, and no
        longer grace: the process ends with it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        if self._is_final and self._timer is not None:
            until = min(until, self._timer.when())
        log.info(
            "draining",
            grace_seconds=round(until - loop.time(), 3),
            num_open=self._service.num_open,
            final=final or self._is_final,
        )
        self._is_final |= final
        self._front.draining = True
        self._stop_timer()
        self._timer = loop.call_at(until, self._hand_over)
        self._front.on_change()

    def undo(self) -> None:
        """Takes requests again. Raises Unavailable when the worker is about to end."""
        if self._is_final:
            raise Unavailable("worker is shutting down", failed_epoch=self._front.epoch)
        if self._front.draining:
            log.info("draining no more")
        self._front.draining = False
        self._stop_timer()
        self._front.on_change()

    def note_change(self) -> None:
        """Sees whether the worker is drained by now."""
        if not self.is_drained:
            self._drained.clear()
            return
        self._stop_timer()
        if not self._drained.is_set():
            self._drained.set()
            log.info("drained")

    async def drained(self) -> None:
        """Returns when the worker is drained."""
        await self._drained.wait()

    def close(self) -> None:
        """Forgets the grace."""
        self._stop_timer()

    def _hand_over(self) -> None:
        self._timer = None
        log.info("handing over", num_open=self._service.num_open)
        self._service.hand_over(Draining("worker is draining", failed_epoch=self._front.epoch))
        self._front.on_change()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _num_pages_held(self) -> int:
        stats = self._front.stats
        return sum(rank.pages_owned + rank.pages_quarantined for rank in stats)
