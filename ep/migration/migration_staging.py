"""Stages the experts that a rank is to hold, in a thread beside its steps, layer after layer: in
spare memory for WINDOW layers, until a layer is installed on all ranks. The weights in service
are only read.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from core.errors import EpserveError, TransferError
from core.log import get_logger
from ep.migration.migration_moves import Move
from ep.placement.expert_slots import ExpertSlots

log = get_logger("ep.migration_staging")

# Layers staged ahead of the one installed last.
WINDOW = 2
# What all ranks together carry in one round, at most, if an expert is not larger.
ROUND_BYTES = 256 << 20

Span = tuple[int, torch.Tensor]
# Writes a slot's bytes, read from the checkpoint, into a row.
ReadExpert = Callable[[int, int, torch.Tensor], None]  # MoE layer, logical expert


class Carrier(Protocol):
    """`carry` returns when this rank's spans of a round have all travelled; TransferError."""

    def carry(self, sends: Sequence[Span], receives: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """What changes in one layer. `moves` of all ranks, from one to the other placement; `slots`
    are this rank's weights; `experts` its logical experts in the new placement, by slot."""

    layer: int
    moves: tuple[Move, ...]
    slots: ExpertSlots
    experts: tuple[int, ...]


class Staging:
    """One run; `begin` starts its thread. `num_staged` and `error` may be read at any time."""

    def __init__(self, run: int, rank: int, device: torch.device) -> None:
        self.run = run
        self.num_staged = 0
        self.num_bytes = 0  # that have come from other ranks
        self.error: str | None = None
        self._rank = rank
        self._device = device
        self._jobs: Sequence[LayerJob] = ()
        self._rows: list[torch.Tensor] = []  # of window w, [slots to fill, most slot_bytes] uint8
        self._room = threading.Semaphore(WINDOW)
        self._stopped = threading.Event()
        self._installed: deque[torch.cuda.Event] = deque()

    @property
    def is_wanted(self) -> bool:
        return not self._stopped.is_set()

    def begin(
        self,
        plan: Callable[[], Sequence[LayerJob]],
        connect: Callable[["Staging"], Carrier] | None,
        read_expert: ReadExpert,
    ) -> None:
        """Stages what is planned from the other ranks, by way of a carrier; without one, all that
        changes from `read_expert`. The thread calls all three."""
        self._note_stream()
        threading.Thread(
            target=self._run,
            args=(plan, connect, read_expert),
            name="expert-staging",
            daemon=True,
        ).start()

    def install(self, index: int) -> None:
        """Puts a staged layer into its slots, on the current stream."""
        assert index < self.num_staged, index
        job, rows = self._jobs[index], self._rows[index % WINDOW]
        for row, move in zip(rows, self._filled_here(job), strict=False):
            job.slots.write(move.slot, row)
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        self._note_stream()
        self._room.release()

    def stop(self) -> None:
        """Does not wait for the thread, which leaves the weights in service alone."""
        self._stopped.set()
        self._room.release()

    def _run(
        self,
        plan: Callable[[], Sequence[LayerJob]],
        connect: Callable[["Staging"], Carrier] | None,
        read_expert: ReadExpert,
    ) -> None:
        carrier: Carrier | None = None
        try:
            self._jobs = plan()
            with self._on_own_stream():
                self._make_room()
                if connect is not None:
                    carrier = connect(self)
                for index, job in enumerate(self._jobs):
                    self._room.acquire()
                    if not self.is_wanted:
                        return
                    self._await_installs()
                    rows = self._rows[index % WINDOW]
                    if carrier is not None:
                        self._stage(job, rows, carrier)
                    else:
                        self._read(job, rows, read_expert)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()
                    self.num_staged = index + 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the group turns back
            log.warning("experts cannot be staged", run=self.run, reason=repr(error))
            self.error = error.message if isinstance(error, EpserveError) else repr(error)
        finally:
            if carrier is not None:
                with suppress(OSError):
                    carrier.close()

    def _on_own_stream(self) -> AbstractContextManager[object]:
        """The thread's work on a GPU runs beside the steps'."""
        if self._device.type != "cuda":
            return nullcontext()
        beside: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(self._device))
        return beside

    def _note_stream(self) -> None:
        """Weights and rows may be touched again once the steps' work so far is done."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._installed.append(event)

    def _await_installs(self) -> None:
        while self._installed:
            self._installed.popleft().synchronize()

    def _make_room(self) -> None:
        most = max((len(self._filled_here(job)) for job in self._jobs), default=0)
        # An MTP layer may be stored in another format than the others.
        slot_bytes = max(job.slots.slot_bytes for job in self._jobs)
        device = self._jobs[0].slots.device
        for _ in range(min(WINDOW, len(self._jobs))):
            self._rows.append(torch.empty((most, slot_bytes), dtype=torch.uint8, device=device))

    def _filled_here(self, job: LayerJob) -> list[Move]:
        return [move for move in job.moves if move.rank == self._rank]

    def _stage(self, job: LayerJob, rows: torch.Tensor, carrier: Carrier) -> None:
        row_of = {move: row for row, move in zip(rows, self._filled_here(job), strict=False)}
        for move, row in row_of.items():
            if not move.travels:
                job.slots.read(move.source_slot, row)
        travelling = [move for move in job.moves if move.travels]
        num_a_round = max(1, ROUND_BYTES // job.slots.slot_bytes)
        for first in range(0, len(travelling), num_a_round):
            sends: list[Span] = []
            receives: list[Span] = []
            for move in travelling[first : first + num_a_round]:
                if move.source_rank == self._rank:
                    sends += ((move.rank, part) for part in job.slots.parts(move.source_slot))
                elif move.rank == self._rank:
                    pieces = job.slots.split(row_of[move])
                    receives += ((move.source_rank, piece) for piece in pieces)
            if not self.is_wanted:
                raise TransferError("the migration was given up")
            carrier.carry(sends, receives)
            self.num_bytes += sum(piece.numel() for _, piece in receives)

    def _read(self, job: LayerJob, rows: torch.Tensor, read_expert: ReadExpert) -> None:
        for row, move in zip(rows, self._filled_here(job), strict=False):
            read_expert(job.layer, job.experts[move.slot], row)
