"""Dispatcher of fixed sizes over an all-gather and an all-to-all: NCCL on GPUs, where both can be
part of a captured CUDA graph, sockets on the CPU.

    dispatch  every rank gets the tokens of all (`gathered_tokens`) and puts those of its experts
              into their blocks
    combine   as in `combine_exchange`: on the CPU exact, on GPUs partial sums, or as told
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.combine_exchange import CombineExchange, exchange_and_combine, one_of_each
from ep.dispatch.dispatcher import DispatchedMasked, Payload
from ep.dispatch.gathered_tokens import gather_tokens
from ep.dispatch.masked_rows import blocks_of, check_tokens, mean_rows
from ep.group.group import EpGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMaskedHandle:
    way: CombineExchange


class CollectiveMaskedDispatcher:
    """All ranks of the group call in the same order, with equally many tokens."""

    def __init__(
        self, group: EpGroup, slots_per_rank: int, max_tokens: int, *, exact: bool | None = None
    ) -> None:
        """`exact` as in `combine_exchange`; None: on the CPU. ValueError for numbers below 1."""
        if min(slots_per_rank, max_tokens) < 1:
            raise ValueError(f"no dispatch of {max_tokens} tokens to {slots_per_rank} slots a rank")
        self._group = group
        self._slots_per_rank = slots_per_rank
        self._max_tokens = max_tokens
        self._exact = exact
        # By T. Captured graphs read them: they stay.
        self._one_of_each: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def dispatch_masked(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids, -1: nobody; else distinct
        topk_weights: torch.Tensor,  # [T, K] float32
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchedMasked:
        check_tokens(len(hidden), self._max_tokens)
        group, slots = self._group, self._slots_per_rank
        tokens = gather_tokens(
            group.collectives,
            group.size,
            hidden,
            topk_idx,
            topk_weights,
            payload,
            len(hidden),
            meanwhile,
        )
        num_tokens = len(hidden)
        if num_tokens not in self._one_of_each:
            self._one_of_each[num_tokens] = one_of_each(group.size, num_tokens, hidden)
        blocks = blocks_of(
            (tokens.hidden, tokens.scales), tokens.topk_idx, slots, first=group.rank * slots
        )
        return DispatchedMasked(
            hidden=blocks.rows,
            scales=blocks.scales,
            counts=blocks.counts,
            handle=CollectiveMaskedHandle(
                way=CombineExchange(
                    row_of=blocks.row_of,
                    weights=tokens.weights,
                    own_idx=topk_idx,
                    own_weights=topk_weights,
                    one_of_each=self._one_of_each[num_tokens],
                )
            ),
            expected_rows=mean_rows(topk_idx.numel(), slots),
        )

    def combine_masked(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[S, C, H] -> [T, H] in the dtype of `expert_out`."""
        assert isinstance(handle, CollectiveMaskedHandle), type(handle)
        return exchange_and_combine(
            expert_out.flatten(0, 1),
            handle.way,
            self._group.collectives,
            self._group.size,
            self._slots_per_rank,
            exact=expert_out.is_cpu if self._exact is None else self._exact,
            base=base,
        )
