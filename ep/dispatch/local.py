"""Dispatcher of a single rank: nothing is sent, rows are only put in the order of their experts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import (
    Computed,
    Dispatched,
    DispatchedAligned,
    DispatchedMasked,
    Payload,
    Rows,
)
from ep.dispatch.masked_rows import as_payload, blocks_of, check_tokens, mean_rows
from ep.dispatch.weighted_sum import weighted_sum
from kernels.elementwise.combine import Combination
from kernels.moe.permute import permute


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHandle:
    """row_of [K, T] integers, the row of each (choice, token) or -1; weights [T, K] float32."""

    row_of: torch.Tensor
    weights: torch.Tensor


class LocalDispatcher:
    """All three forms. All experts are here: physical expert id = slot."""

    def __init__(self, num_slots: int, max_tokens: int = 0) -> None:
        """`max_tokens` of the masked form; 0: there is no need of it. ValueError when there is no
        slot."""
        if num_slots < 1 or max_tokens < 0:
            raise ValueError(
                f"num_slots must be at least 1, got {num_slots}, for {max_tokens} tokens"
            )
        self._num_slots = num_slots
        self._max_tokens = max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def dispatch(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        if meanwhile is not None:
            meanwhile()
        num_tokens, num_choices = topk_idx.shape
        assert tokens_per_rank == (num_tokens,), (tokens_per_rank, num_tokens)
        expert = topk_idx.reshape(-1)
        counts = torch.bincount(expert, minlength=self._num_slots).cpu()
        assert counts.numel() == self._num_slots, "physical expert id out of range"
        order = torch.argsort(expert, stable=True)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(order.numel(), device=order.device)
        return Dispatched(
            hidden=hidden[order // num_choices],
            expert_counts=counts,
            handle=LocalHandle(
                row_of=row_of.view(num_tokens, num_choices).t(), weights=topk_weights
            ),
        )

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[N, H] -> [T, H] in the dtype of `expert_out`."""
        assert isinstance(handle, LocalHandle), type(handle)
        return weighted_sum(expert_out, handle.row_of, handle.weights)

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
    ) -> Iterator[DispatchedAligned]:
        """One part."""
        if meanwhile is not None:
            meanwhile()
        assert tokens_per_rank == (len(hidden),), (tokens_per_rank, len(hidden))
        values, scales = as_payload(hidden, payload) if rows is None else rows
        placed = permute(values, topk_idx, self._num_slots, alignment=alignment, scale=scales)
        arrived = DispatchedAligned(
            hidden=placed.rows,
            scales=placed.scales,
            counts=placed.counts,
            ends=placed.ends,
            slot_of=placed.expert_of,
            handle=LocalHandle(row_of=placed.row_of, weights=topk_weights),
        )
        return iter((arrived,))

    def dispatch_masked(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, slots or -1
        topk_weights: torch.Tensor,  # [T, K] float32
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> DispatchedMasked:
        """`rows`: `hidden` as it travels, by a caller who needs that too."""
        check_tokens(len(hidden), self._max_tokens)
        if meanwhile is not None:
            meanwhile()
        if rows is None and payload.scale is not None:
            rows = as_payload(hidden, payload)
        quantises = payload.quantises and rows is None
        blocks = blocks_of(rows or (hidden, None), topk_idx, self._num_slots, quantises=quantises)
        return DispatchedMasked(
            hidden=blocks.rows,
            scales=blocks.scales,
            counts=blocks.counts,
            handle=LocalHandle(row_of=blocks.row_of, weights=topk_weights),
            expected_rows=mean_rows(topk_idx.numel(), self._num_slots),
        )

    def combine_aligned(self, computed: Iterable[Computed]) -> torch.Tensor:
        """[T, H] in the dtype of what the experts made."""
        (whole,) = computed
        return self.combine_masked(*whole)

    def combine_masked(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[S, C, H] or [M, H] -> [T, H] in the dtype of `expert_out`, added to `base`."""
        return self.combination_of(expert_out, handle, base).combined()

    def combination_of(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> Combination:
        """What these two would add up, for a norm that does it on its way."""
        assert isinstance(handle, LocalHandle), type(handle)
        rows = expert_out.flatten(0, -2)
        return Combination(rows=rows, row_of=handle.row_of, weights=handle.weights, base=base)
