"""Dispatcher over DeepEP: queues over NVLink and RDMA for prefill, its low-latency kernels for
decode.

    normal       a token travels once to each rank that holds experts of it, is put in expert order
                 there, and returns as one weighted sum a rank. The sums are rounded to bfloat16
                 before they are added up: a bit or two off the other dispatchers
    low-latency  a token travels to each of its experts and every result returns unweighted; no
                 size depends on the routing and nothing waits for the host
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ep.dispatch.deep_ep_buffer import DeepEpBuffer, Layout
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import (
    Computed,
    Dispatched,
    DispatchedAligned,
    DispatchedMasked,
    Payload,
    Rows,
)
from ep.dispatch.masked_rows import as_payload
from ep.dispatch.row_caps import PartHandle, RowPart, aligned_part, joined, row_parts
from kernels.elementwise.combine import combine
from kernels.moe.permute import permute


class MaskedHandle(NamedTuple):
    """Of our own tokens: topk_idx [T, K] int64, topk_weights [T, K] float32; `raw` is DeepEP's.

    A tuple because it is made in every layer of a step that takes tens of microseconds a layer.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    raw: object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Received:
    """What came here: hidden [R, H], scales [R, H / 128], [R, 1] or None, topk_idx [R, K] int64
    slots or -1, weights [R, K] float32, rows of each slot."""

    hidden: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    raw: object


class DeepEpDispatcher:
    """All three forms, for models of these needs. Hidden states are bfloat16 on the device of the
    buffer. Calls are in the same order on all ranks."""

    def __init__(self, buffer: DeepEpBuffer, needs: DispatchNeeds) -> None:
        self._buffer = buffer
        self._num_slots = needs.slots_per_rank
        self._num_experts = buffer.group.size * needs.slots_per_rank
        self._hidden = needs.hidden
        self._max_tokens = needs.masked_tokens
        self._row_cap = needs.row_cap
        self._layout = Layout(
            max_tokens=needs.masked_tokens, hidden=needs.hidden, num_experts=self._num_experts
        )

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        """As `Dispatcher.dispatch`; waits for the counts of all ranks on the host."""
        received = self._send(
            hidden, topk_idx, topk_weights, tokens_per_rank, Payload.PLAIN, meanwhile
        )
        (whole,) = row_parts(received.topk_idx, sum(received.counts), 0)
        placed = self._placed(received, whole, alignment=1)
        return Dispatched(
            hidden=placed.hidden,
            expert_counts=torch.tensor(received.counts, dtype=torch.int64),
            handle=placed.handle,
        )

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[N, H] -> [T, H]."""
        return self.combine_aligned([(expert_out, handle)])

    def dispatch_aligned(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        payload: Payload,
        alignment: int,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> Iterator[DispatchedAligned]:
        """As `AlignedDispatcher.dispatch_aligned`; the number of tokens that come here is waited
        for on the host, their places only where one part will not do."""
        received = self._send(
            hidden, topk_idx, topk_weights, tokens_per_rank, payload, meanwhile, rows
        )
        num_rows = max(1, sum(received.counts))  # kernels on nothing cannot be launched
        parts = row_parts(received.topk_idx, num_rows, self._row_cap)
        return map(partial(self._placed, received, alignment=alignment), parts)

    def combine_aligned(self, computed: Iterable[Computed]) -> torch.Tensor:
        """[T, H]."""

        def of(rows: torch.Tensor, part: PartHandle[object]) -> torch.Tensor:
            return combine(rows, part.row_of, part.weights)

        sums, raw = joined(computed, of)
        out: torch.Tensor
        out, _, _ = self._buffer.raw.combine(sums, raw, config=self._buffer.combine_config)
        self._buffer.end_normal()
        return out

    def dispatch_masked(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchedMasked:
        """As `MaskedDispatcher.dispatch_masked`; FP8 always comes with a scale for each 128 values,
        as DeepEP quantises. Two dispatches may be open at a time."""
        num_tokens, width = hidden.shape
        if num_tokens > self._max_tokens:
            raise ValueError(f"{num_tokens} tokens, buffers are for {self._max_tokens}")
        if width != self._hidden or hidden.dtype is not torch.bfloat16:
            raise self._unfit(hidden)
        is_fp8, in_two_halves = payload.quantises, meanwhile is not None
        topk_idx, topk_weights = topk_idx.contiguous(), topk_weights.contiguous()
        self._buffer.begin_low_latency(self._layout)
        received, counts, raw, _, receive = self._buffer.raw.low_latency_dispatch(
            hidden.contiguous(),
            topk_idx,
            self._max_tokens,
            self._num_experts,
            use_fp8=is_fp8,
            return_recv_hook=in_two_halves,
        )
        if meanwhile is not None:
            meanwhile()
            receive()
        rows, scales = received if is_fp8 else (received, None)
        return DispatchedMasked(
            hidden=rows,
            scales=scales,
            counts=counts,
            handle=MaskedHandle(topk_idx, topk_weights, raw),
            expected_rows=-(-num_tokens * topk_idx.shape[1] // self._num_slots),
        )

    def combine_masked(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[slots_per_rank, C, H] bfloat16 -> [T, H]; rounded before `base` is added."""
        assert isinstance(handle, MaskedHandle), type(handle)
        out: torch.Tensor
        out, _, _ = self._buffer.raw.low_latency_combine(expert_out, *handle)
        self._buffer.end_low_latency()
        return out if base is None else out.add_(base)

    def _placed(self, received: _Received, part: RowPart, *, alignment: int) -> DispatchedAligned:
        permuted = permute(
            received.hidden[part.tokens],
            received.topk_idx[part.tokens],
            self._num_slots,
            alignment=alignment,
            scale=None if received.scales is None else received.scales[part.tokens],
            most=part.num_rows,
        )
        return aligned_part(part, permuted, len(received.hidden), received.weights, received.raw)

    def _send(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        payload: Payload,
        meanwhile: Callable[[], None] | None,
        rows: Rows | None = None,
    ) -> _Received:
        """`meanwhile` is enqueued before the wait for the counts, beside DeepEP's stream."""
        group, raw = self._buffer.group, self._buffer.raw
        assert len(tokens_per_rank) == group.size, tokens_per_rank
        assert tokens_per_rank[group.rank] == len(hidden), (tokens_per_rank, len(hidden))
        if hidden.shape[1] != self._hidden or hidden.dtype is not torch.bfloat16:
            raise self._unfit(hidden)
        hidden, topk_idx = hidden.contiguous(), topk_idx.contiguous()
        sent: object = hidden
        if payload.quantises:
            values, scales = rows or as_payload(hidden, payload)
            # FP8 it only takes with scales.
            sent = values.view(torch.bfloat16) if scales is None else (values, scales)
        beside: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
        per_rank, per_node, per_expert, is_in_rank, laid_out = raw.get_dispatch_layout(
            topk_idx,
            self._num_experts,
            previous_event=self._buffer.library.Buffer.capture(),
            **beside,
        )
        if meanwhile is not None:
            meanwhile()
        received, slots, weights, counts, handle, arrived = raw.dispatch(
            sent,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights.contiguous(),
            config=self._buffer.dispatch_config,
            previous_event=laid_out,
            **beside,
        )
        arrived.current_stream_wait()
        values, scales = received if isinstance(received, tuple) else (received, None)
        return _Received(
            hidden=values.view(torch.float8_e4m3fn) if payload.quantises else values,
            scales=scales,
            topk_idx=slots,
            weights=weights,
            counts=counts,
            raw=handle,
        )

    def _unfit(self, hidden: torch.Tensor) -> ValueError:
        return ValueError(
            f"rows are {self._hidden} values of bfloat16, not {tuple(hidden.shape)} of "
            f"{hidden.dtype}"
        )
