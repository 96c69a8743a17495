"""One rank's part in moving experts between the ranks of its group, while the group steps.

    migration.begin(target)                  # at a step boundary, on all ranks at the same one
    ... facts of the next exchange hold migration.report ...
    outcome = migration.at_boundary(reports)  # after every exchange; not None when it is over

All that a step reads (weights, maps) changes in `at_boundary` only.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from core.errors import Unavailable
from core.log import get_logger
from ep.dispatch.expert_shard import ExpertShard
from ep.group.group import EpGroup
from ep.migration.migration_device import DeviceCarrier
from ep.migration.migration_moves import layer_moves
from ep.migration.migration_sockets import SocketCarrier
from ep.migration.migration_staging import ROUND_BYTES, Carrier, LayerJob, ReadExpert, Staging
from ep.migration.migration_state import (
    Action,
    End,
    Install,
    MigrationPhase,
    MigrationState,
    Outcome,
    Report,
    Stage,
    Stop,
)
from ep.placement.expert_slots import ExpertSlots
from ep.placement.placement import Placement

log = get_logger("ep.migration")

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 60.0
# The interpreter's lock is needed for the steps: what the thread works out, it does bit by bit.
YIELD_SECONDS = 0.001


class Progress(NamedTuple):
    """Layers that are as they are to be, of those that change; bytes that have come here."""

    num_layers_done: int
    num_layers: int
    num_bytes: int


class Ended(NamedTuple):
    """`reason` is why it is not DONE, where this rank knows."""

    outcome: Outcome
    reason: str


class ExpertMigration:
    """Use from the rank's own thread. `layers` are the weights of the MoE layers."""

    def __init__(
        self,
        group: EpGroup,
        shard: ExpertShard,
        layers: Sequence[ExpertSlots],
        read_expert: ReadExpert,
        *,
        bytes_per_second: float,
    ) -> None:
        self.version = 0
        self._group = group
        self._shard = shard
        self._layers = layers
        self._read_expert = read_expert
        self._bytes_per_second = bytes_per_second
        self._state = MigrationState()
        self._staging: Staging | None = None
        self._old = self._target = shard.placement
        self._in_force = list(shard.placement.physical_to_logical)
        self._changed: tuple[int, ...] = ()
        self._num_begun = 0
        self._reason = ""
        self._num_bytes = 0
        # NOTE: every rank makes it, at the same point.
        self._own_group = dist.new_group() if group.uses_torch else None
        self._can_carry = True

    @property
    def placement(self) -> Placement:
        """In force now."""
        return self._old.with_layers(dict(enumerate(self._in_force)))

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights in one layer."""
        return self._layers[0].slot_bytes if self._layers else 0

    @property
    def is_moving(self) -> bool:
        return self._state.phase is not MigrationPhase.IDLE

    @property
    def can_install(self) -> bool:
        """Whether there is something to be done at the next boundary already."""
        return self._state.can_install

    @property
    def progress(self) -> Progress:
        arriving = self._staging.num_bytes if self._staging is not None else 0
        return Progress(self._state.num_changed, len(self._changed), self._num_bytes + arriving)

    @property
    def report(self) -> Report:
        """For the next exchange."""
        staging = self._staging
        if staging is not None:
            self._state.staged(staging.run, staging.num_staged)
            if staging.error is not None:
                self._reason = self._reason or staging.error
                self._state.failed(staging.run)
        return self._state.report

    def begin(self, target: Placement) -> None:
        """At a step boundary, on all ranks at the same one, when none is under way. `target` has
        the shape of the placement in force, and differs from it."""
        self._old, self._target = self.placement, target
        assert target.has_shape_of(self._old)
        self._changed = tuple(
            layer
            for layer, experts in enumerate(target.physical_to_logical)
            if experts != self._in_force[layer]
        )
        self._num_begun += 1
        self._num_bytes = 0
        self._reason = ""
        self._perform(self._state.begin(len(self._changed)))

    def at_boundary(self, reports: Sequence[Report]) -> Ended | None:
        """Takes in all ranks' reports; on all ranks after every exchange."""
        return self._perform(self._state.exchanged(reports))

    def _perform(self, actions: Sequence[Action]) -> Ended | None:
        ended = None
        for action in actions:
            match action:
                case Stage(run, num_layers, restore):
                    self._stage(run, num_layers, restore)
                case Install(_, index, restore):
                    self._install(index, restore)
                case Stop():
                    self._drop_staging()
                    if self._own_group is not None and self._can_carry:
                        # One that failed within a round may have left others in it. All come
                        # here at the same boundary.
                        log.warning("experts come from the checkpoint from now on")
                        self._can_carry = False
                case End(outcome):
                    self._drop_staging()
                    self.version += outcome is not Outcome.RESTORED
                    ended = Ended(outcome, self._reason)
        return ended

    def _stage(self, run: int, num_layers: int, restore: bool) -> None:
        goal = self._old if restore else self._target
        changing = {layer: self._in_force[layer] for layer in self._changed[:num_layers]}

        def plan() -> list[LayerJob]:
            jobs = []
            for layer, now in changing.items():
                jobs.append(self._job(layer, now, goal))
                time.sleep(YIELD_SECONDS)
            return jobs

        self._staging = Staging(run, self._shard.rank, self._layers[0].device)
        reads = restore or not self._can_carry
        self._staging.begin(plan, None if reads else self._connect, self._read_expert)

    def _job(self, layer: int, now: tuple[int, ...], goal: Placement) -> LayerJob:
        return LayerJob(
            layer=layer,
            moves=layer_moves(now, goal.physical_to_logical[layer], goal.slots_per_rank),
            slots=self._layers[layer],
            experts=goal.local_experts(layer, self._shard.rank),
        )

    def _install(self, index: int, restore: bool) -> None:
        assert self._staging is not None
        layer = self._changed[index]
        goal = self._old if restore else self._target
        self._staging.install(index)
        self._shard.maps.write(goal, (layer,))
        self._in_force[layer] = goal.physical_to_logical[layer]

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._num_bytes += self._staging.num_bytes
            self._reason = self._reason or self._staging.error or ""
            self._staging.stop()
            self._staging = None

    def _connect(self, staging: Staging) -> Carrier:
        """In the staging thread."""
        try:
            peers = self._group.side_connections(f"migration/{self._num_begun}", CONNECT_SECONDS)
        except RuntimeError as error:  # the store is gone
            raise Unavailable(f"no connections for a migration: {error}") from error
        silence_seconds = SILENCE_SECONDS
        if self._own_group is not None:
            # Who has carried a round faster than allowed comes to the next one so much later.
            silence_seconds += max(ROUND_BYTES, self.expert_bytes) / self._bytes_per_second
        sockets = SocketCarrier(
            peers,
            bytes_per_second=self._bytes_per_second,
            silence_seconds=silence_seconds,
            is_wanted=lambda: staging.is_wanted,
        )
        if self._own_group is None:
            return sockets
        return DeviceCarrier(self._own_group, sockets, bytes_per_second=self._bytes_per_second)
