"""Performs what `Supervision` decides: starts, watches, signals, reports."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ctl.child import Child
from ctl.process_spec import ProcessSpec
from ctl.readiness import wait_until_ready
from ctl.supervision import (
    Action,
    Elapsed,
    Event,
    Exited,
    Finish,
    GiveUp,
    Kill,
    Limits,
    Phase,
    Ready,
    SayAllReady,
    SayDied,
    SayLeft,
    SayReady,
    Start,
    StopRequested,
    Supervision,
    Terminate,
)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_STARTED = 127  # exit status of a process that could not be started at all


class Reporter(Protocol):
    """Tells the operator; must not block."""

    def waiting_for(self, names: Sequence[str]) -> None: ...
    def ready(self, name: str, seconds: float, again: bool) -> None: ...
    def all_ready(self, seconds: float, pids: dict[str, int]) -> None: ...
    def died(self, name: str, status: int, backoff_seconds: float) -> None: ...
    def left(self, name: str) -> None: ...
    def gave_up(self, name: str, status: int, log: Path) -> None: ...
    def not_ready_in_time(self, names: Sequence[str], seconds: float) -> None: ...
    def stopping(self, names: Sequence[str]) -> None: ...
    def stopped(self, seconds: float) -> None: ...


class Supervisor:
    """One cluster, from its start to its end. `run` is called once."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_folder: Path,
        reporter: Reporter,
        *,
        limits: Limits | None = None,
        ready_timeout_seconds: float = 600.0,
        probe: Callable[[ProcessSpec], Coroutine[Any, Any, None]] = wait_until_ready,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._log_folder = log_folder
        self._reporter = reporter
        fronts = [spec.name for spec in specs if spec.role == "gateway"]
        self._machine = Supervision([*self._specs], limits or Limits(), fronts=fronts)
        self._ready_timeout_seconds = ready_timeout_seconds
        self._probe = probe
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._started_at: dict[str, float] = {}
        self._began = 0.0
        self._stop_began: float | None = None
        self._failed = False

    def log_of(self, name: str) -> Path:
        """The file that a process's output goes to."""
        return self._log_folder / f"{name}.log"

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
        self._began = time.monotonic()
        watchdog = loop.call_later(self._ready_timeout_seconds, self._check_ready)
        try:
            for spec in self._specs.values():
                self.log_of(spec.name).write_bytes(b"")
            finished = await self._perform(self._machine.start(self._began))
            while not finished:
                self._reporter.waiting_for(self._machine.names(Phase.STARTING))
                event = await self._next_event()
                finished = await self._perform(self._machine.step(event, time.monotonic()))
                self._note_stop()
        finally:
            watchdog.cancel()
            for number in stop_signals:
                loop.remove_signal_handler(number)
            await self._leave_nothing()
        self._reporter.stopped(time.monotonic() - (self._stop_began or self._began))
        return 1 if self._failed else 0

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
                case _:
                    self._report(action)
        return False

    def _report(self, action: Action) -> None:
        now = time.monotonic()
        match action:
            case SayReady(name, again):
                self._reporter.ready(name, now - self._started_at[name], again)
            case SayAllReady():
                pids = {name: child.pid for name, child in self._children.items()}
                self._reporter.all_ready(now - self._began, pids)
            case SayDied(name, status, backoff_seconds):
                self._reporter.died(name, status, backoff_seconds)
            case SayLeft(name):
                self._reporter.left(name)
            case GiveUp(name, status):
                self._failed = True
                self._reporter.gave_up(name, status, self.log_of(name))

    async def _start(self, spec: ProcessSpec) -> None:
        self._started_at[spec.name] = time.monotonic()
        try:
            self._log_folder.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
            child = await Child.start(spec, self.log_of(spec.name))
        except OSError as error:
            with suppress(OSError):  # the log may be the reason
                self.log_of(spec.name).write_text(f"cannot be started: {error}\n", encoding="utf-8")
            self._events.put_nowait(Exited(spec.name, _NOT_STARTED))
            return
        self._children[spec.name] = child
        self._probes[spec.name] = asyncio.create_task(self._ask(spec))
        watch = asyncio.create_task(self._watch(spec.name, child))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _ask(self, spec: ProcessSpec) -> None:
        await self._probe(spec)
        self._events.put_nowait(Ready(spec.name))

    async def _watch(self, name: str, child: Child) -> None:
        status = await child.wait()
        self._probes[name].cancel()
        self._events.put_nowait(Exited(name, status))

    def _note_stop(self) -> None:
        if self._machine.stopping and self._stop_began is None:
            self._stop_began = time.monotonic()
            for probe in self._probes.values():
                probe.cancel()
            self._reporter.stopping(self._machine.names(Phase.STOPPING))

    def _check_ready(self) -> None:
        if not self._machine.all_were_ready and not self._machine.stopping:
            self._failed = True
            self._reporter.not_ready_in_time(
                self._machine.names(Phase.STARTING, Phase.WAITING), self._ready_timeout_seconds
            )
            self.request_stop()

    async def _leave_nothing(self) -> None:
        """Also after an exception of ours: no process, no task."""
        for child in self._children.values():
            child.kill()
        tasks = [*self._probes.values(), *self._watches]
        for probe in self._probes.values():
            probe.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
