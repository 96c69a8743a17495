"""A process of a test's cluster: its event loop, and whether it still does anything."""

from typing import Any

from core.clock import ManualClock
from tests.protocol.still_loop import StillLoop


class Process:
    """`service` answers calls; `is_frozen` as under SIGSTOP."""

    def __init__(self, name: str, network: Any, clock: ManualClock) -> None:
        self.name = name
        self.network = network
        self.loop = StillLoop(clock, self)
        self.is_alive = True
        self.is_frozen = False
        self.service: Any = None

    @property
    def can_run(self) -> bool:
        return self.is_alive and not self.is_frozen

    def freeze(self) -> None:
        self.is_frozen = True

    def go_on(self) -> None:
        self.is_frozen = False
        self.loop.run_ready()

    def state(self) -> object:
        """All of it that matters for what comes."""
        if not self.is_alive:
            return None
        return self.is_frozen, self.service, self.loop.timers, self.loop.tasks
