"""Dispatcher over an all-gather and an all-to-all whose rows get their places on the device.

As `collective_masked`, for ranks with unequally many tokens, padded to the longest. It waits for
the device once a dispatch, to learn how many rows are for the experts of this rank: room for all
that could be would be as many times too large as there are ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.combine_exchange import CombineExchange, exchange_and_combine
from ep.dispatch.dispatcher import DispatchedAligned, Payload, Rows
from ep.dispatch.gathered_tokens import gather_tokens
from ep.dispatch.masked_rows import as_payload
from ep.group.group import EpGroup
from kernels.moe.permute import permute


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveAlignedHandle:
    """`way` is None when no rank had a token."""

    way: CombineExchange | None
    num_tokens: int


class CollectiveAlignedDispatcher:
    """All ranks of the group call in the same order, with the same `tokens_per_rank`."""

    def __init__(self, group: EpGroup, slots_per_rank: int, *, exact: bool | None = None) -> None:
        """`exact` as in `combine_exchange`; None: on the CPU. ValueError when `slots_per_rank` is
        below 1."""
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank must be at least 1, got {slots_per_rank}")
        self._group = group
        self._slots_per_rank = slots_per_rank
        self._exact = exact

    def dispatch_aligned(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        payload: Payload,
        alignment: int,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> DispatchedAligned:
        """`rows` are not used: what travels is packed from `hidden`, quantised on the way."""
        group, slots = self._group, self._slots_per_rank
        assert tokens_per_rank[group.rank] == len(hidden), (tokens_per_rank, len(hidden))
        longest = max(tokens_per_rank)
        if longest:
            tokens = gather_tokens(
                group.collectives,
                group.size,
                hidden,
                topk_idx,
                topk_weights,
                payload,
                longest,
                meanwhile,
            )
            values, scales, topk_idx = tokens.hidden, tokens.scales, tokens.topk_idx.long()
        else:
            (values, scales), tokens = as_payload(hidden, payload), None
            if meanwhile is not None:
                meanwhile()
        first = group.rank * slots
        here = (topk_idx >= first) & (topk_idx < first + slots)
        permuted = permute(
            values.contiguous(),
            torch.where(here, topk_idx - first, -1),
            slots,
            alignment=alignment,
            scale=scales,
            most=int(here.sum()),
        )
        way = None
        if tokens is not None:
            way = CombineExchange(
                row_of=permuted.row_of,
                weights=tokens.weights,
                own_idx=topk_idx[group.rank * longest :][:longest],
                own_weights=tokens.weights[group.rank * longest :][:longest],
            )
        return DispatchedAligned(
            hidden=permuted.rows,
            scales=permuted.scales,
            counts=permuted.counts,
            ends=permuted.ends,
            slot_of=permuted.expert_of,
            handle=CollectiveAlignedHandle(way=way, num_tokens=len(hidden)),
        )

    def combine_aligned(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[M, H] -> [T, H] in the dtype of `expert_out`."""
        assert isinstance(handle, CollectiveAlignedHandle), type(handle)
        if handle.way is None:
            return expert_out[:0]
        everything = exchange_and_combine(
            expert_out,
            handle.way,
            self._group.collectives,
            self._group.size,
            self._slots_per_rank,
            exact=expert_out.is_cpu if self._exact is None else self._exact,
        )
        return everything[: handle.num_tokens]
