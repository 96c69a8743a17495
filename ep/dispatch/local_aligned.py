"""Dispatcher of a single rank whose rows get their places on the device: no step waits for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import DispatchedAligned, Payload, Rows
from ep.dispatch.masked_rows import as_payload
from kernels.elementwise.combine import Combination
from kernels.moe.permute import permute


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAlignedHandle:
    """row_of [K, T] int32, the row of each (choice, token); weights [T, K] float32."""

    row_of: torch.Tensor
    weights: torch.Tensor


class LocalAlignedDispatcher:
    """All experts are here: physical expert id = slot."""

    def __init__(self, num_slots: int) -> None:
        """ValueError when `num_slots` is below 1."""
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self._num_slots = num_slots

    def dispatch_aligned(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        payload: Payload,
        alignment: int,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> DispatchedAligned:
        if meanwhile is not None:
            meanwhile()
        assert tokens_per_rank == (len(hidden),), (tokens_per_rank, len(hidden))
        values, scales = as_payload(hidden, payload) if rows is None else rows
        placed = permute(values, topk_idx, self._num_slots, alignment=alignment, scale=scales)
        return DispatchedAligned(
            hidden=placed.rows,
            scales=placed.scales,
            counts=placed.counts,
            ends=placed.ends,
            slot_of=placed.expert_of,
            handle=LocalAlignedHandle(row_of=placed.row_of, weights=topk_weights),
        )

    def combine_aligned(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[M, H] -> [T, H] in the dtype of `expert_out`, added to `base`."""
        return self.combination_of(expert_out, handle, base).combined()

    def combination_of(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> Combination:
        """What `combine_aligned` would add up, for a norm that does it on its way."""
        assert isinstance(handle, LocalAlignedHandle), type(handle)
        return Combination(rows=expert_out, row_of=handle.row_of, weights=handle.weights, base=base)
