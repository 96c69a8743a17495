"""Orders about experts on a rank: load reports and moves, agreed with the other ranks.

The front of node 0 gives them to rank 0. They reach all ranks as part of a step: rank 0 tells in
the facts of an exchange how long the order is that it is about to send, and after that exchange
all ranks take part in the sending and in what follows from it.

    facts = group.exchange((..., *experts.facts()))
    answers = experts.at_boundary([rank's part of facts])     # before the forward pass
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from core.clock import Clock
from core.log import get_logger
from engine.link.messages import (
    ExpertAnswer,
    ExpertOrder,
    ExpertReport,
    ExpertsMoved,
    ExpertsMoving,
    MoveExperts,
    ReportExperts,
)
from engine.start.rank import RankContext
from ep.migration.migration import ExpertMigration
from ep.migration.migration_state import Outcome, Report
from ep.placement.expert_slots import ExpertSlots
from model.config import ModelConfig
from model.moe.experts import load_experts
from model.weights.checkpoint import Checkpoint
from model.weights.tensor_names import layer_prefix
from model.weights.weights import Weights

log = get_logger("engine.rank_experts")

# While experts move, ranks that are idle look this often whether a layer is staged.
MOVING_POLL_SECONDS = 0.005
# How often the front hears of a move under way.
PROGRESS_SECONDS = 0.1

_ORDER = msgspec.msgpack.Decoder(ExpertOrder)


class RankExperts:
    """Use from the rank's loop only."""

    def __init__(self, context: RankContext, clock: Clock) -> None:
        self._group = context.group
        self._shard = context.model.experts
        self._clock = clock
        layers = [ExpertSlots(moe.experts.slot_tensors) for moe in context.model.moe_layers]
        reader = CheckpointExperts(
            context.settings.model, context.config, context.kv_cache.device, context.kv_cache.dtype
        )
        self._migration = ExpertMigration(
            context.group,
            self._shard,
            layers,
            reader.read,
            bytes_per_second=context.settings.rebalance_bytes_per_second,
        )
        self._orders: list[bytes] = []
        self._told = Report()
        self._move_id = 0
        self._reported_at = 0.0

    @property
    def has_news(self) -> bool:
        """Whether a step is wanted, though there may be no tokens for it."""
        migration = self._migration
        return bool(self._orders) or migration.can_install or migration.report != self._told

    @property
    def wait_seconds(self) -> float:
        """How long an idle rank may sleep."""
        return MOVING_POLL_SECONDS if self._migration.is_moving else float("inf")

    def hear(self, order: ExpertOrder) -> None:
        """What the front has said."""
        self._orders.append(msgspec.msgpack.encode(order))

    def facts(self) -> tuple[int, ...]:
        """For the next exchange: bytes of the order to come, the migration's report, and bytes
        that it has brought here."""
        self._told = report = self._migration.report
        order_bytes = len(self._orders[0]) if self._orders else 0
        num_bytes = self._migration.progress.num_bytes
        return order_bytes, report.num_staged, int(report.has_failed), num_bytes

    def has_work(self, facts: Sequence[tuple[int, ...]]) -> bool:
        """Whether `at_boundary` would do anything; the same on all ranks."""
        return self._migration.is_moving or facts[0][0] > 0

    def at_boundary(self, facts: Sequence[tuple[int, ...]]) -> list[ExpertAnswer]:
        """After the exchange of all ranks' facts; what there is to tell the front."""
        answers: list[ExpertAnswer] = []
        if self._migration.is_moving:
            answers += self._go_on(facts)
        order_bytes = facts[0][0]
        if order_bytes:
            own = self._orders.pop(0) if self._orders else b""
            order = _ORDER.decode(self._group.broadcast(own, order_bytes))
            if isinstance(order, ReportExperts):
                answers += self._report(order)
            else:
                answers += self._begin(order)
        return answers

    def _go_on(self, facts: Sequence[tuple[int, ...]]) -> list[ExpertAnswer]:
        ended = self._migration.at_boundary([Report(fact[1], bool(fact[2])) for fact in facts])
        progress = self._migration.progress
        num_bytes = sum(fact[3] for fact in facts)
        if ended is not None:
            self._told = Report()
            if ended.outcome is not Outcome.DONE:
                log.warning("experts not moved", outcome=ended.outcome.value, reason=ended.reason)
            return self._moved(ended.outcome.value, ended.reason, num_bytes)
        now = self._clock.now()
        if self._group.rank or now - self._reported_at < PROGRESS_SECONDS:
            return []
        self._reported_at = now
        return [
            ExpertsMoving(
                move_id=self._move_id,
                num_layers_done=progress.num_layers_done,
                num_layers=progress.num_layers,
                num_bytes=num_bytes,
            )
        ]

    def _report(self, order: ReportExperts) -> list[ExpertAnswer]:
        gathered = self._group.gather(self._shard.counts.cpu().numpy().tobytes())
        if not gathered:
            return []
        tokens = sum(np.frombuffer(counts, dtype=np.int64) for counts in gathered)
        placement = self._migration.placement
        return [
            ExpertReport(
                report_id=order.report_id,
                placement_version=self._migration.version,
                num_ranks=placement.num_ranks,
                slots_per_rank=placement.slots_per_rank,
                num_logical=placement.num_logical,
                expert_bytes=self._migration.expert_bytes,
                physical_to_logical=placement.physical_to_logical,
                tokens=np.asarray(tokens, dtype=np.int64).tobytes(),
            )
        ]

    def _begin(self, order: MoveExperts) -> list[ExpertAnswer]:
        """All ranks come to the same conclusion."""
        self._move_id = order.move_id
        if self._migration.is_moving:
            return self._moved("refused", "experts are moving already", 0)
        now = self._migration.placement
        try:
            target = now.with_layers(order.layers)
        except ValueError as error:
            return self._moved("refused", str(error), 0)
        if target == now:
            return self._moved(Outcome.DONE.value, "", 0)
        self._migration.begin(target)
        self._reported_at = self._clock.now()
        return []

    def _moved(self, outcome: str, reason: str, num_bytes: int) -> list[ExpertAnswer]:
        if self._group.rank:
            return []
        return [
            ExpertsMoved(
                move_id=self._move_id,
                outcome=outcome,
                reason=reason,
                placement_version=self._migration.version,
                num_bytes=num_bytes,
            )
        ]


class CheckpointExperts:
    """Reads single experts as `ExpertSlots` hold them; for one thread at a time. The files are
    opened at the first one."""

    def __init__(
        self, folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        self._config = config
        self._device = device
        self._dtype = dtype
        self._checkpoint: Checkpoint | None = None
        self._prefixes = [f"{layer_prefix(layer)}.mlp" for layer in config.moe_layer_numbers]

    def read(self, layer: int, expert: int, row: torch.Tensor) -> None:
        """One expert of a MoE layer into `row` [slot_bytes] uint8. CheckpointError, OSError."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self._folder)
        weights = Weights(checkpoint=self._checkpoint, device=self._device, dtype=self._dtype)
        loaded = load_experts(weights, self._config, self._prefixes[layer], [expert])
        ExpertSlots(loaded.slot_tensors).read(0, row)
