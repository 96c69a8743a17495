"""Performs what `Supervision` decides: starts, watches, signals, reports."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ctl.local.child import Child
from ctl.local.log_files import LogFiles
from ctl.local.process_spec import ProcessSpec
from ctl.local.readiness import until_silent, wait_until_ready
from ctl.local.supervision import (
    Action,
    Elapsed,
    Event,
    Exited,
    Finish,
    Kill,
    Limits,
    ProcessPhase,
    Ready,
    Reporter,
    Start,
    StopRequested,
    Supervision,
    Terminate,
)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_STARTED = 127  # exit status of a process that could not be started at all


class Supervisor:
    """One cluster, from its start to its end. `run` is called once."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        logs: LogFiles,
        reporter: Reporter,
        *,
        limits: Limits,
        probe: Callable[[ProcessSpec], Coroutine[Any, Any, None]] = wait_until_ready,
        until_silent: Callable[[ProcessSpec], Coroutine[Any, Any, None]] = until_silent,
    ) -> None:
        """`probe` returns once a process serves, `until_silent` once it answers nothing any more:
        it is killed then."""
        self._specs = {spec.name: spec for spec in specs}
        self._logs = logs
        self._reporter = reporter
        fronts = [spec.name for spec in specs if spec.role == "gateway"]
        self._machine = Supervision([*self._specs], limits, reporter, fronts=fronts)
        self._probe = probe
        self._until_silent = until_silent
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def request_stop(self) -> None:
        """Has everything stopped; called again: killed."""
        self._events.put_nowait(StopRequested())

    async def run(self) -> int:
        """Until everything is down again. 0 when the operator wanted that, 1 otherwise."""
        loop = asyncio.get_running_loop()
        # Under nohup the end of the terminal is not to be the end of the cluster.
        stop_signals = [
            number
            for number in _STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        for number in stop_signals:
            loop.add_signal_handler(number, self.request_stop)
        keeping = asyncio.create_task(self._logs.keep_small())
        try:
            self._logs.begin()
            finished = await self._perform(self._machine.start(time.monotonic()))
            while not finished:
                self._reporter.waiting_for(self._machine.names(ProcessPhase.STARTING))
                event = await self._next_event()
                finished = await self._perform(self._machine.step(event, time.monotonic()))
        finally:
            for number in stop_signals:
                loop.remove_signal_handler(number)
            keeping.cancel()
            await self._leave_nothing()
        return 1 if self._machine.failed else 0

    async def _next_event(self) -> Event:
        deadline = self._machine.deadline()
        if deadline is None:
            return await self._events.get()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return Elapsed()

    async def _perform(self, actions: Sequence[Action]) -> bool:
        """Whether that was the end."""
        for action in actions:
            match action:
                case Start(name):
                    await self._start(self._specs[name])
                case Terminate(name) if name in self._children:
                    self._children[name].terminate()
                case Kill(name) if name in self._children:
                    self._children[name].kill()
                case Terminate() | Kill():
                    pass  # it could not even be started; its Exited is on the way
                case Finish():
                    return True
        return False

    async def _start(self, spec: ProcessSpec) -> None:
        log = self._logs.path(spec.name)
        try:
            self._logs.folder.mkdir(parents=True, exist_ok=True)  # it may have been tidied up
            child = await Child.start(spec, log)
        except OSError as error:
            with suppress(OSError):  # the log may be the reason
                log.write_text(f"cannot be started: {error}\n", encoding="utf-8")
            self._events.put_nowait(Exited(spec.name, _NOT_STARTED))
            return
        self._children[spec.name] = child
        self._reporter.started(spec.name, child.pid)
        watch = asyncio.create_task(self._watch(spec, child))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _ask(self, spec: ProcessSpec, child: Child) -> None:
        await self._probe(spec)
        self._events.put_nowait(Ready(spec.name))
        await self._until_silent(spec)
        self._reporter.silent(spec.name)
        child.kill()

    async def _watch(self, spec: ProcessSpec, child: Child) -> None:
        probe = asyncio.create_task(self._ask(spec, child))
        try:
            status = await child.wait()
        finally:
            probe.cancel()
        self._events.put_nowait(Exited(spec.name, status))

    async def _leave_nothing(self) -> None:
        """Also after an exception of ours: no process, no task."""
        for child in self._children.values():
            child.kill()
        if self._watches:
            await asyncio.wait(self._watches, timeout=1.0)
