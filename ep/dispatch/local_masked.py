"""Dispatcher of fixed sizes of a single rank: rows are only put into their experts' blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import DispatchedMasked, Payload, Rows
from ep.dispatch.masked_rows import as_payload, blocks_of, check_tokens, mean_rows
from kernels.elementwise.combine import Combination


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMaskedHandle:
    """row_of [K, T] int32, the row of each (choice, token) or -1; weights [T, K] float32."""

    row_of: torch.Tensor
    weights: torch.Tensor


class LocalMaskedDispatcher:
    """All experts are here: physical expert id = slot."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        """ValueError when one of them is below 1."""
        if min(num_slots, max_tokens) < 1:
            raise ValueError(f"no dispatch of {max_tokens} tokens to {num_slots} slots")
        self._num_slots = num_slots
        self._max_tokens = max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

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
            handle=LocalMaskedHandle(row_of=blocks.row_of, weights=topk_weights),
            expected_rows=mean_rows(topk_idx.numel(), self._num_slots),
        )

    def combine_masked(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[S, C, H] -> [T, H] in the dtype of `expert_out`."""
        return self.combination_of(expert_out, handle, base).combined()

    def combination_of(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> Combination:
        """What `combine_masked` would add up, for a norm that does it on its way."""
        assert isinstance(handle, LocalMaskedHandle), type(handle)
        return Combination(
            rows=expert_out.flatten(0, 1),
            row_of=handle.row_of,
            weights=handle.weights,
            base=base,
        )
