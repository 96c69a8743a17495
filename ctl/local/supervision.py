"""When a process is started, restarted, given up on and stopped: a state machine without I/O.

    STARTING --Ready--> RUNNING --Exited--> WAITING --(backoff over)--> STARTING
      ^ |                 | |                  ^
      | `--Exited---------|-'------------------'
      `---Exited well-----'                           StopRequested: every state -> STOPPING | GONE

Events go in with the time (monotonic seconds), actions come out; `Supervisor` performs them, and
a `Reporter` is told what happened.
A stop ends the fronts first: the answers that they still give need all the others.
A process that dies before the whole cluster was up once, `max_early_exits` times in a row or with
a usage error, ends the cluster: it is misconfigured, and restarting it would hide that.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

USAGE_ERROR = 2  # exit status of a process that was started with settings it refuses


class ProcessPhase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # dead; to be started again when its backoff is over
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times of supervision, in seconds."""

    # All processes have this long until they have been up at the same time once.
    ready_seconds: float = 600.0
    first_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 10.0
    # Alive this long, and the next death counts as the first one again.
    stable_seconds: float = 30.0
    # Fronts have this long to end, running requests and all, and the others after them.
    front_seconds: float = 3.5
    kill_after_seconds: float = 3.5
    # A process that even SIGKILL does not end within this is left to the kernel.
    abandon_after_seconds: float = 1.0
    max_early_exits: int = 3


class Reporter(Protocol):
    """Tells the operator; must not block."""

    def started(self, name: str, pid: int) -> None: ...
    def waiting_for(self, names: Sequence[str]) -> None: ...
    def ready(self, name: str, seconds: float, again: bool) -> None: ...
    def all_ready(self, seconds: float) -> None: ...
    def silent(self, name: str) -> None: ...
    def died(self, name: str, status: int, backoff_seconds: float) -> None: ...
    def left(self, name: str) -> None: ...
    def gave_up(self, name: str, status: int) -> None: ...
    def not_ready_in_time(self, names: Sequence[str], seconds: float) -> None: ...
    def stopping(self, names: Sequence[str]) -> None: ...
    def stopped(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _OfProcess:
    name: str


class Ready(_OfProcess):
    """The process serves."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended, or could not be started at all; a negative status is a signal."""

    name: str
    status: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator wants everything down; a second one: at once."""


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Nothing happened but the time that `deadline()` named."""


Event = Ready | Exited | StopRequested | Elapsed


class Start(_OfProcess):
    """To be started."""


class Terminate(_OfProcess):
    """To be asked to end."""


class Kill(_OfProcess):
    """To be ended at once, with all that it started."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Every process is gone, or beyond our reach."""


Action = Start | Terminate | Kill | Finish


@dataclass(slots=True)
class _Process:
    name: str
    phase: ProcessPhase = ProcessPhase.STARTING
    started_at: float = 0.0
    restart_at: float = 0.0
    num_deaths: int = 0  # in a row
    was_ready: bool = False


class Supervision:
    """All processes of one `ctl up`; `fronts` are those that clients talk to. `failed` says that
    the cluster was given up, and what is left of it is being stopped."""

    def __init__(
        self,
        names: list[str],
        limits: Limits,
        reporter: Reporter,
        *,
        fronts: Collection[str] = (),
    ) -> None:
        if len(set(names)) != len(names):
            raise ValueError(f"two processes of one name in {names}")
        self.failed = False
        self._limits = limits
        self._reporter = reporter
        self._fronts = frozenset(fronts)
        self._processes = {name: _Process(name) for name in names}
        self._began = 0.0
        self._all_were_ready = False
        self._stage: Literal["", "fronts", "others", "killed"] = ""  # of the stop
        self._stop_began = 0.0
        self._next_stage_at = 0.0

    def names(self, *phases: ProcessPhase) -> list[str]:
        """Processes in one of these phases, in order."""
        return [each.name for each in self._in(*phases)]

    def start(self, now: float) -> list[Action]:
        """The first actions: all processes at once, so that they load in parallel."""
        self._began = now
        return [self._start(process, now) for process in self._processes.values()]

    def deadline(self) -> float | None:
        """When `Elapsed` is due, or None."""
        if self._stage:
            return self._next_stage_at
        times = [each.restart_at for each in self._in(ProcessPhase.WAITING)]
        if not self._all_were_ready:
            times.append(self._began + self._limits.ready_seconds)
        return min(times, default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case Ready(name):
                self._ready(self._processes[name], now)
                return []
            case Exited(name, status):
                return self._exited(self._processes[name], status, now)
            case StopRequested():
                return self._kill_all(now) if self._stage else self._stop(now)
            case Elapsed():
                return self._elapsed(now)

    def _start(self, process: _Process, now: float) -> Action:
        process.phase = ProcessPhase.STARTING
        process.started_at = now
        return Start(process.name)

    def _ready(self, process: _Process, now: float) -> None:
        if process.phase is not ProcessPhase.STARTING:
            return  # it died, or is being stopped, since it was asked
        process.phase = ProcessPhase.RUNNING
        self._reporter.ready(process.name, now - process.started_at, process.was_ready)
        process.was_ready = True
        is_up = all(each.phase is ProcessPhase.RUNNING for each in self._processes.values())
        if is_up and not self._all_were_ready:
            self._all_were_ready = True
            self._reporter.all_ready(now - self._began)

    def _exited(self, process: _Process, status: int, now: float) -> list[Action]:
        if self._stage:
            process.phase = ProcessPhase.GONE
            left = self.names(ProcessPhase.STOPPING)
            if not left:
                return self._finish(now)
            is_last_front = self._stage == "fronts" and self._fronts.isdisjoint(left)
            return self._terminate_others(now) if is_last_front else []
        if status == 0 and process.phase is ProcessPhase.RUNNING:
            self._reporter.left(process.name)
            return [self._start(process, now)]
        if now - process.started_at >= self._limits.stable_seconds:
            process.num_deaths = 0
        process.num_deaths += 1
        misconfigured = status == USAGE_ERROR or process.num_deaths >= self._limits.max_early_exits
        if misconfigured and not self._all_were_ready:
            process.phase = ProcessPhase.GONE
            self.failed = True
            self._reporter.gave_up(process.name, status)
            return self._stop(now)
        backoff_seconds = min(
            self._limits.first_backoff_seconds * 2.0 ** min(process.num_deaths - 1, 30),
            self._limits.max_backoff_seconds,
        )
        process.phase = ProcessPhase.WAITING
        process.restart_at = now + backoff_seconds
        self._reporter.died(process.name, status, backoff_seconds)
        return []

    def _elapsed(self, now: float) -> list[Action]:
        if self._stage:
            return self._next_stage(now) if now >= self._next_stage_at else []
        if not self._all_were_ready and now >= self._began + self._limits.ready_seconds:
            self.failed = True
            late = self.names(ProcessPhase.STARTING, ProcessPhase.WAITING)
            self._reporter.not_ready_in_time(late, self._limits.ready_seconds)
            return self._stop(now)
        waiting = self._in(ProcessPhase.WAITING)
        return [self._start(each, now) for each in waiting if now >= each.restart_at]

    def _stop(self, now: float) -> list[Action]:
        self._stop_began = now
        # One that still starts has no requests.
        fronts = [name for name in self.names(ProcessPhase.RUNNING) if name in self._fronts]
        for process in self._processes.values():
            alive = process.phase in (ProcessPhase.STARTING, ProcessPhase.RUNNING)
            process.phase = ProcessPhase.STOPPING if alive else ProcessPhase.GONE
        names = self.names(ProcessPhase.STOPPING)
        self._reporter.stopping(names)
        if not names:
            return self._finish(now)
        if not fronts:
            return self._terminate_others(now)
        self._stage, self._next_stage_at = "fronts", now + self._limits.front_seconds
        return [*map(Terminate, fronts)]

    def _next_stage(self, now: float) -> list[Action]:
        match self._stage:
            case "fronts":
                left = self.names(ProcessPhase.STOPPING)
                fronts = [Kill(name) for name in left if name in self._fronts]
                return [*fronts, *self._terminate_others(now)]
            case "others":
                return self._kill_all(now)
            case _:
                return self._finish(now)

    def _terminate_others(self, now: float) -> list[Action]:
        told = self._fronts if self._stage == "fronts" else ()
        self._stage, self._next_stage_at = "others", now + self._limits.kill_after_seconds
        return [Terminate(name) for name in self.names(ProcessPhase.STOPPING) if name not in told]

    def _kill_all(self, now: float) -> list[Action]:
        if self._stage != "killed":
            self._stage, self._next_stage_at = "killed", now + self._limits.abandon_after_seconds
        return [Kill(name) for name in self.names(ProcessPhase.STOPPING)]

    def _finish(self, now: float) -> list[Action]:
        self._reporter.stopped(now - self._stop_began)
        return [Finish()]

    def _in(self, *phases: ProcessPhase) -> list[_Process]:
        return [each for each in self._processes.values() if each.phase in phases]
