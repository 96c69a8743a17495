"""Dispatcher over an all-gather and an all-to-all: sockets on the CPU, NCCL on GPUs.

    dispatch  every rank gets the hidden rows and expert ids of all tokens, packed into one
              all-gather padded to the longest rank, and keeps the rows of its experts
    combine   each (token, choice) row returns, unweighted, to the rank of its token, by one
              all-to-all; that rank adds them up with the weights, which never travel

Why rows and not a reduce-scatter of per-rank partial sums: partial sums would be added in an
order that depends on the placement. Like this the sum is taken over the same rows in the same
order as by `LocalDispatcher`, bit for bit, whatever the number of ranks; and K rows a token
are not more than R - 1 partial sums a token unless the group is smaller than K.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import Dispatched
from ep.dispatch.routes import plan_routes
from ep.dispatch.weighted_sum import weighted_sum
from ep.group.group import EpGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveHandle:
    """The way back; fields as in `Routes`, and weights [T, K] float32."""

    send_row: torch.Tensor
    send_rows: list[int]
    receive_rows: list[int]
    row_of: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class NothingHandle:
    """No rank had a token."""


class CollectiveDispatcher:
    """All ranks of the group call in the same order, with the same `tokens_per_rank`."""

    def __init__(self, group: EpGroup, slots_per_rank: int) -> None:
        """ValueError when `slots_per_rank` is below 1."""
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank must be at least 1, got {slots_per_rank}")
        self._group = group
        self._slots_per_rank = slots_per_rank

    def dispatch(
        self,
        hidden: torch.Tensor,  # [T, H] of 2 or 4 bytes an element
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        num_tokens, num_choices = topk_idx.shape
        assert len(tokens_per_rank) == self._group.size, tokens_per_rank
        assert tokens_per_rank[self._group.rank] == num_tokens, (tokens_per_rank, num_tokens)
        longest = max(tokens_per_rank)
        if not longest:
            if meanwhile is not None:
                meanwhile()
            counts = torch.zeros(self._slots_per_rank, dtype=torch.int64)
            return Dispatched(hidden=hidden, expert_counts=counts, handle=NothingHandle())
        all_hidden, all_idx = self._gather(hidden, topk_idx, longest, meanwhile)
        routes = plan_routes(
            all_idx.cpu().numpy().astype("int64").reshape(-1, longest, num_choices),
            tokens_per_rank,
            rank=self._group.rank,
            slots_per_rank=self._slots_per_rank,
        )
        device = hidden.device
        return Dispatched(
            hidden=all_hidden.index_select(0, torch.from_numpy(routes.gathered_row).to(device)),
            expert_counts=torch.from_numpy(routes.expert_counts),
            handle=CollectiveHandle(
                send_row=torch.from_numpy(routes.send_row).to(device),
                send_rows=routes.send_rows,
                receive_rows=routes.receive_rows,
                row_of=torch.from_numpy(routes.row_of).to(device),
                weights=topk_weights,
            ),
        )

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[N, H] -> [T, H] in the dtype of `expert_out`."""
        if isinstance(handle, NothingHandle):
            return expert_out
        assert isinstance(handle, CollectiveHandle), type(handle)
        received = expert_out.new_empty((sum(handle.receive_rows), expert_out.shape[1]))
        self._group.collectives.all_to_all(
            received,
            handle.receive_rows,
            expert_out.index_select(0, handle.send_row),
            handle.send_rows,
        )
        return weighted_sum(received, handle.row_of, handle.weights)

    def _gather(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        longest: int,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows [R * longest, H] and expert ids [R * longest, K] int32 of all ranks.

        A packed row is the hidden row in whole 32-bit words, then K words of expert ids.
        """
        num_tokens, width = hidden.shape
        num_choices = topk_idx.shape[1]
        assert hidden.element_size() in (2, 4), hidden.dtype
        words = -(-width * hidden.element_size() // 4)
        own = hidden.new_empty((longest, words + num_choices), dtype=torch.int32)
        own[:num_tokens, :words].view(hidden.dtype)[:, :width] = hidden
        own[:num_tokens, words:] = topk_idx
        everything = own.new_empty((self._group.size * longest, words + num_choices))
        self._group.collectives.all_gather(everything, own, meanwhile)
        return everything[:, :words].view(hidden.dtype)[:, :width], everything[:, words:]
