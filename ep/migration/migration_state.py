"""When which layer's experts change places: the same decisions on all ranks of a group.

Layers are staged in the background, one after the other. A rank reports how many it has staged
with every exchange of the group; a layer is installed on all ranks at the first step boundary at
which all have it. Every rank decides from the same reports.

    idle -> moving -> idle (done)
              |
              +----> restoring -> idle (restored, or broken)

When a rank's transfer fails, the group turns back: layers installed by then return to the old
placement, from the checkpoint. Were that to fail as well, each layer still has one placement that
all ranks agree on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class MigrationPhase(Enum):
    IDLE = "idle"
    MOVING = "moving"
    RESTORING = "restoring"


class Outcome(Enum):
    """DONE: the new placement is in force; RESTORED: the old one; BROKEN: each in some layers."""

    DONE = "done"
    RESTORED = "restored"
    BROKEN = "broken"


class Report(NamedTuple):
    """What a rank tells the others of the run that it is in."""

    num_staged: int = 0
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Begin to stage layers 0 .. num_layers - 1 of the migration, in this order; `restore`:
    those of the old placement, from the checkpoint."""

    run: int
    num_layers: int
    restore: bool


@dataclass(frozen=True, slots=True)
class Install:
    """Layer `index` of the migration is staged everywhere: it changes now."""

    run: int
    index: int
    restore: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """What this run has staged or still stages is not wanted any more."""

    run: int


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome


Action = Stage | Install | Stop | End


class MigrationState:
    """One rank's view, which only its own `report` may differ in."""

    def __init__(self) -> None:
        self.phase = MigrationPhase.IDLE
        self.num_layers = 0
        self.num_installed = 0  # of the present run
        self.num_agreed = 0  # that all ranks have told to be staged
        self._run = 0
        self._num_staged = 0
        self._has_failed = False

    @property
    def report(self) -> Report:
        return Report(self._num_staged, self._has_failed)

    @property
    def can_install(self) -> bool:
        """Whether the next boundary brings a layer, whatever is reported by then."""
        return self.num_agreed > self.num_installed

    @property
    def num_changed(self) -> int:
        """Layers that are as the migration under way wants them."""
        if self.phase is MigrationPhase.RESTORING:
            return self.num_layers - self.num_installed
        return self.num_installed

    def begin(self, num_layers: int) -> list[Action]:
        """At a step boundary, on all ranks at the same one."""
        assert self.phase is MigrationPhase.IDLE, self.phase
        assert num_layers >= 1, num_layers
        return self._start(MigrationPhase.MOVING, num_layers)

    def staged(self, run: int, num_layers: int) -> None:
        """So many layers of the run are staged on this rank; news of an earlier run is none."""
        if run == self._run and self.phase is not MigrationPhase.IDLE:
            assert self._num_staged <= num_layers <= self.num_layers, num_layers
            self._num_staged = num_layers

    def failed(self, run: int) -> None:
        """This rank can stage no further."""
        if run == self._run and self.phase is not MigrationPhase.IDLE:
            self._has_failed = True

    def exchanged(self, reports: Sequence[Report]) -> list[Action]:
        """All ranks' reports, at a step boundary. One layer a boundary, so that no step is held up
        by more than one."""
        if self.phase is MigrationPhase.IDLE:
            return []
        if any(report.has_failed for report in reports):
            return self._turn_back()
        self.num_agreed = min(report.num_staged for report in reports)
        if not self.can_install:
            return []
        restore = self.phase is MigrationPhase.RESTORING
        actions: list[Action] = [Install(self._run, self.num_installed, restore)]
        self.num_installed += 1
        if self.num_installed == self.num_layers:
            actions += self._end(Outcome.RESTORED if restore else Outcome.DONE)
        return actions

    def _turn_back(self) -> list[Action]:
        stop = Stop(self._run)
        if self.phase is MigrationPhase.RESTORING:
            return [stop, *self._end(Outcome.BROKEN)]
        if not self.num_installed:
            return [stop, *self._end(Outcome.RESTORED)]
        return [stop, *self._start(MigrationPhase.RESTORING, self.num_installed)]

    def _start(self, phase: MigrationPhase, num_layers: int) -> list[Action]:
        self.phase = phase
        self.num_layers = num_layers
        self.num_installed = self.num_agreed = self._num_staged = 0
        self._has_failed = False
        self._run += 1
        return [Stage(self._run, num_layers, restore=phase is MigrationPhase.RESTORING)]

    def _end(self, outcome: Outcome) -> list[Action]:
        self.phase = MigrationPhase.IDLE
        self.num_installed = self.num_agreed = self._num_staged = 0
        self._has_failed = False
        return [End(outcome)]
