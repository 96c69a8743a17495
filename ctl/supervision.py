"""When a process is started, restarted, given up on and stopped: a state machine without I/O.

    STARTING --Ready--> RUNNING --Exited--> WAITING --(backoff over)--> STARTING
      ^ |                 | |                  ^
      | `--Exited---------|-'------------------'
      `---Exited well-----'                           StopRequested: every state -> STOPPING | GONE

Events go in with the time (monotonic seconds), actions come out; `Supervisor` performs them.
A stop ends the fronts first: the answers that they still give need all the others.
A process that dies before the whole cluster was up once, `max_early_exits` times in a row or with
a usage error, ends the cluster: it is misconfigured, and restarting it would hide that.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

USAGE_ERROR = 2  # exit status of a process that was started with settings it refuses


class Phase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # dead; to be started again when its backoff is over
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times of supervision, in seconds."""

    first_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 10.0
    # Alive this long, and the next death counts as the first one again.
    stable_seconds: float = 30.0
    # Fronts have this long to end, running requests and all, and the others behind them.
    front_seconds: float = 3.5
    kill_after_seconds: float = 3.5
    # A process that even SIGKILL does not end within this is left to the kernel.
    abandon_after_seconds: float = 1.0
    max_early_exits: int = 3


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves."""

    name: str


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


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    name: str


@dataclass(frozen=True, slots=True)
class SayReady:
    """`again`: it had been ready before."""

    name: str
    again: bool


@dataclass(frozen=True, slots=True)
class SayDied:
    """The process died unasked; it is started again in `backoff_seconds`."""

    name: str
    status: int
    backoff_seconds: float


@dataclass(frozen=True, slots=True)
class SayLeft:
    """The process ended well: somebody asked it to. It is started again at once."""

    name: str


@dataclass(frozen=True, slots=True)
class SayAllReady:
    """Every process is up for the first time."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The cluster cannot be started because of this process; the rest is being stopped."""

    name: str
    status: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every process is gone, or beyond our reach."""


Action = Start | Terminate | Kill | SayReady | SayDied | SayLeft | SayAllReady | GiveUp | Finish


@dataclass(slots=True)
class _Process:
    name: str
    phase: Phase = Phase.STARTING
    started_at: float = 0.0
    restart_at: float = 0.0
    num_deaths: int = 0  # in a row
    was_ready: bool = False


class Supervision:
    """All processes of one `ctl up`; `fronts` are those that clients talk to."""

    def __init__(self, names: list[str], limits: Limits, *, fronts: Collection[str] = ()) -> None:
        if len(set(names)) != len(names):
            raise ValueError(f"two processes of one name in {names}")
        self._limits = limits
        self._fronts = frozenset(fronts)
        self._processes = {name: _Process(name) for name in names}
        self._all_were_ready = False
        self._stopping = False
        self._killed = False
        self._fronts_leave = False  # they are being stopped, and nothing else is yet
        self._next_at: float | None = None  # of the stop: fronts' end, the kill, the end

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def all_were_ready(self) -> bool:
        """Every process has been up at the same time once."""
        return self._all_were_ready

    def names(self, *phases: Phase) -> list[str]:
        """Processes in one of these phases, in order."""
        return [each.name for each in self._processes.values() if each.phase in phases]

    def start(self, now: float) -> list[Action]:
        """The first actions: all processes at once, so that they load in parallel."""
        for process in self._processes.values():
            process.started_at = now
        return [Start(name) for name in self._processes]

    def deadline(self) -> float | None:
        """When `Elapsed` is due, or None."""
        if self._stopping:
            return self._next_at
        waiting = [each for each in self._processes.values() if each.phase is Phase.WAITING]
        return min((each.restart_at for each in waiting), default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case Ready(name):
                return self._ready(self._processes[name])
            case Exited(name, status):
                return self._exited(self._processes[name], status, now)
            case StopRequested():
                return self._kill_all(now) if self._stopping else self._stop(now)
            case Elapsed():
                return self._elapsed(now)

    def _ready(self, process: _Process) -> list[Action]:
        if process.phase is not Phase.STARTING:
            return []  # it died, or is being stopped, since it was asked
        process.phase = Phase.RUNNING
        actions: list[Action] = [SayReady(process.name, process.was_ready)]
        process.was_ready = True
        if not self._all_were_ready and len(self.names(Phase.RUNNING)) == len(self._processes):
            self._all_were_ready = True
            actions.append(SayAllReady())
        return actions

    def _exited(self, process: _Process, status: int, now: float) -> list[Action]:
        if self._stopping:
            process.phase = Phase.GONE
            if self._all_gone():
                return [Finish()]
            is_last_front = self._fronts_leave and not self._fronts & {*self.names(Phase.STOPPING)}
            return self._stop_rest(now) if is_last_front else []
        if status == 0 and process.phase is Phase.RUNNING:
            process.phase = Phase.STARTING
            process.started_at = now
            return [SayLeft(process.name), Start(process.name)]
        if now - process.started_at >= self._limits.stable_seconds:
            process.num_deaths = 0
        process.num_deaths += 1
        misconfigured = status == USAGE_ERROR or process.num_deaths >= self._limits.max_early_exits
        if misconfigured and not self._all_were_ready:
            process.phase = Phase.GONE
            return [GiveUp(process.name, status), *self._stop(now)]
        backoff_seconds = min(
            self._limits.first_backoff_seconds * 2.0 ** min(process.num_deaths - 1, 30),
            self._limits.max_backoff_seconds,
        )
        process.phase = Phase.WAITING
        process.restart_at = now + backoff_seconds
        return [SayDied(process.name, status, backoff_seconds)]

    def _elapsed(self, now: float) -> list[Action]:
        if self._stopping:
            if self._next_at is None or now < self._next_at:
                return []
            if self._fronts_leave:
                fronts = [name for name in self.names(Phase.STOPPING) if name in self._fronts]
                return [*map(Kill, fronts), *self._stop_rest(now)]
            return self._abandon() if self._killed else self._kill_all(now)
        actions: list[Action] = []
        for process in self._processes.values():
            if process.phase is Phase.WAITING and now >= process.restart_at:
                process.phase = Phase.STARTING
                process.started_at = now
                actions.append(Start(process.name))
        return actions

    def _stop(self, now: float) -> list[Action]:
        self._stopping = True
        # One that still starts has no requests.
        fronts = [name for name in self.names(Phase.RUNNING) if name in self._fronts]
        for process in self._processes.values():
            alive = process.phase in (Phase.STARTING, Phase.RUNNING)
            process.phase = Phase.STOPPING if alive else Phase.GONE
        if self._all_gone():
            return [Finish()]
        if not fronts:
            return self._stop_rest(now)
        self._fronts_leave = True
        self._next_at = now + self._limits.front_seconds
        return [*map(Terminate, fronts)]

    def _stop_rest(self, now: float) -> list[Action]:
        self._next_at = now + self._limits.kill_after_seconds
        fronts = self._fronts if self._fronts_leave else ()
        self._fronts_leave = False
        return [Terminate(name) for name in self.names(Phase.STOPPING) if name not in fronts]

    def _kill_all(self, now: float) -> list[Action]:
        self._fronts_leave = False
        if not self._killed:
            self._killed = True
            self._next_at = now + self._limits.abandon_after_seconds
        return [Kill(name) for name in self.names(Phase.STOPPING)]

    def _abandon(self) -> list[Action]:
        self._next_at = None
        for process in self._processes.values():
            process.phase = Phase.GONE
        return [Finish()]

    def _all_gone(self) -> bool:
        return len(self.names(Phase.GONE)) == len(self._processes)
