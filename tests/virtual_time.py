"""An event loop whose time jumps: what waits for minutes is tested in no time, to the microsecond.

run_virtually(test()): `asyncio.get_running_loop().time()`, `sleep`, `timeout` and `LoopClock` are
on a time that stands still while anything runs, and jumps to the next timer when nothing does.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class LoopClock:
    """The running loop's time, as a `core.clock.Clock`."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "all wait, and nothing will ever happen"
            self._loop.seconds += max(0.0, timeout)
        return events


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end in a loop of its own."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)
