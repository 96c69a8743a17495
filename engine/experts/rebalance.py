"""One rebalance under way, for those who watch it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from core.clock import Clock
from core.errors import EpserveError, InternalError, TransferError
from engine.experts.rebalance_plan import RebalancePlan
from engine.link.messages import ExpertsMoved, ExpertsMoving

# A watcher hears something this often, news or not.
WATCH_SECONDS = 1.0


class Rebalance:
    """`plan` being applied; `seconds` since it began. All calls from the event loop's thread."""

    def __init__(
        self, move_id: int, plan: RebalancePlan, clock: Clock, *, is_roll_back: bool = False
    ) -> None:
        self.move_id = move_id
        self.plan = plan
        self.is_roll_back = is_roll_back
        self.num_layers_done = 0
        self.num_bytes_done = 0
        self.placement_version = plan.placement_version
        self.error: EpserveError | None = None
        self.is_over = False
        self._clock = clock
        self._began = clock.now()
        self._ended = 0.0
        self._news = asyncio.Event()

    @property
    def seconds(self) -> float:
        return (self._ended if self.is_over else self._clock.now()) - self._began

    def progressed(self, moving: ExpertsMoving) -> None:
        self.num_layers_done = moving.num_layers_done
        self.num_bytes_done = moving.num_bytes
        self._tell()

    def moved(self, moved: ExpertsMoved) -> None:
        """The ranks are done with it."""
        self.placement_version = moved.placement_version
        self.num_bytes_done = moved.num_bytes
        if moved.outcome == "done":
            self.num_layers_done = len(self.plan.layers)
            self.end(None)
        else:
            self.end(_error(moved))

    def end(self, error: EpserveError | None) -> None:
        self._ended = self._clock.now()
        self.error = error
        self.is_over = True
        self._tell()

    async def watch(self) -> AsyncIterator[None]:
        """Yields at once, whenever something has changed, and last when it is over."""
        while not self.is_over:
            news = self._news
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await news.wait()
        yield

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _error(moved: ExpertsMoved) -> EpserveError:
    why = moved.reason or "a rank could not move its experts, its log says why"
    if moved.outcome == "restored":
        return TransferError(f"the old placement is in force again: {why}")
    if moved.outcome == "refused":
        return TransferError(f"nothing was moved: {why}")
    return InternalError(f"some layers have the new placement, others the old one: {why}")
