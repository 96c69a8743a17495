"""Dispatcher of a single rank: nothing is sent, rows are only put in expert order."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import Dispatched
from ep.dispatch.weighted_sum import weighted_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHandle:
    """row_of [K, T] int64, the row of each (choice, token); weights [T, K] float32."""

    row_of: torch.Tensor
    weights: torch.Tensor


class LocalDispatcher:
    """All experts are here: physical expert id = slot."""

    def __init__(self, num_slots: int) -> None:
        """ValueError when `num_slots` is below 1."""
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self._num_slots = num_slots

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
