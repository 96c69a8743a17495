"""A dispatcher between ranks that are threads of one process: all see all, in lockstep."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import Dispatched


class Meeting:
    """Where `size` threads swap values; everybody gets everybody's."""

    def __init__(self, size: int) -> None:
        self._values: list[object] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def swap(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class Handle:
    """Of each row: the rank, token and weight that it is for."""

    owners: list[tuple[int, int, float]]
    num_tokens: int


@dataclass
class ThreadDispatcher:
    meeting: Meeting
    rank: int
    slots_per_rank: int

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        if meanwhile is not None:
            meanwhile()
        everybody = self.meeting.swap(self.rank, (hidden, topk_idx, topk_weights))
        assert tuple(len(sent[0]) for sent in everybody) == tokens_per_rank
        rows: list[torch.Tensor] = []
        owners: list[tuple[int, int, float]] = []
        counts = []
        for slot in range(self.slots_per_rank):
            physical = self.rank * self.slots_per_rank + slot
            counts.append(0)
            for rank, (theirs, idx, weights) in enumerate(everybody):
                for token, choice in (idx == physical).nonzero().tolist():
                    rows.append(theirs[token])
                    owners.append((rank, token, float(weights[token, choice])))
                    counts[-1] += 1
        stacked = torch.stack(rows) if rows else hidden.new_empty(0, hidden.shape[1])
        return Dispatched(
            hidden=stacked, expert_counts=torch.tensor(counts), handle=Handle(owners, len(hidden))
        )

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        assert isinstance(handle, Handle)
        total = expert_out.new_zeros(handle.num_tokens, expert_out.shape[1])
        for owners, out in self.meeting.swap(self.rank, (handle.owners, expert_out)):
            for (rank, token, weight), row in zip(owners, out, strict=True):
                if rank == self.rank:
                    total[token] += weight * row
        return total
