"""An event loop that runs what is ready and never waits: its time is a clock turned by hand."""

import asyncio
from asyncio import events
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from core.clock import ManualClock


class StillLoop(asyncio.BaseEventLoop):
    """Of one process, `owner`. Tasks that fail are defects: nothing here raises but by mistake."""

    def __init__(self, clock: ManualClock, owner: object) -> None:
        super().__init__()
        self.owner = owner
        self.tasks: list[asyncio.Task[Any]] = []
        self._clock = clock
        self._selector = self  # there are no files
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)
        self._error: BaseException | None = None

    def time(self) -> float:
        return self._clock.now()

    def select(self, _timeout: float) -> list[object]:
        return []

    def _process_events(self, _events: list[object]) -> None: ...

    @property
    def next_timer(self) -> float | None:
        return min((timer.when() for timer in self.timers), default=None)

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]

    def run_ready(self) -> None:
        """Until nothing is left to do at this time. Raises what a task has raised."""
        events._set_running_loop(self)
        try:
            while self._ready or (self._scheduled and self._scheduled[0].when() <= self.time()):
                self._run_once()
        finally:
            events._set_running_loop(None)
        if self._error is not None:
            raise self._error
        over = [task for task in self.tasks if task.done()]
        self.tasks = [task for task in self.tasks if not task.done()]
        for task in over:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def abandon(self) -> None:
        """Nothing is gone on with."""
        for task in self.tasks:
            task.cancel()
        with suppress(Exception):
            self.run_ready()
        self.close()

    def _note_error(self, _loop: object, context: dict[str, Any]) -> None:
        if "handle" in context:  # and not a future that nobody waits for any more
            self._error = context["exception"]

    def _make_task(
        self, _loop: object, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, **options)
        task._log_destroy_pending = False
        self.tasks.append(task)
        return task
