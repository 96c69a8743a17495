"""The low-latency half of DeepEP's twin."""

from collections.abc import Callable
from typing import Any

import torch

from tests.ep.fake_deep_ep_sizes import low_latency_size
from tests.ep.thread_ranks import Meeting

KNOWN_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
MOST_CHOICES = 11
LEAST_PEAK = 1e-4  # of what is scaled to FP8
LARGEST = 448.0

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LowLatency:
    rank: int
    size: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_qps: int
    meeting: Meeting
    calls: list[str]

    def begin_low_latency(self) -> None:
        self.is_dirty = False  # whether the normal mode has used the memory
        self._num_experts = 0  # says where the signals are; 0: all is zero
        self._num_in_flight = 0
        self._shuffle = torch.Generator().manual_seed(1 + self.rank)

    def clean_low_latency_buffer(self, num_tokens: int, hidden: int, num_experts: int) -> None:
        self.calls.append("clean")
        assert self._num_in_flight == 0
        self.meeting.swap(self.rank, None)
        self.is_dirty, self._num_experts = False, num_experts

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: None = None,
        dispatch_wait_recv_cost_stats: None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Received, torch.Tensor, Any, Any, Callable[[], None] | None]:
        self.calls.append("low_latency_dispatch")
        most = num_max_dispatch_tokens_per_rank
        assert not round_scale
        assert not use_ue8m0
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] in KNOWN_HIDDEN
        assert not use_fp8 or x.shape[1] % 512 == 0
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert len(x) == len(topk_idx) <= most
        assert topk_idx.shape[1] <= MOST_CHOICES
        assert bool((topk_idx < num_experts).all())
        assert self.size * most % 4 == 0
        assert not (async_finish and return_recv_hook)
        self._use_memory(most, x.shape[1], num_experts)
        self._num_in_flight += 1
        assert self._num_in_flight <= 2
        num_slots = num_experts // self.size
        rows = torch.empty(num_slots, self.size * most, x.shape[1], dtype=torch.bfloat16)
        rows.fill_(float("nan"))
        counts = torch.full((num_slots,), -(2**31), dtype=torch.int32)
        source = torch.full((num_slots, self.size * most, 2), -1)
        everybody: Any = self.meeting.swap(self.rank, (x.clone(), topk_idx.clone()))
        packed, scales = _empty_fp8(rows) if use_fp8 else (rows, None)

        def receive() -> None:
            for slot in range(num_slots):
                expert = self.rank * num_slots + slot
                arrived = [
                    (rank, int(token))
                    for rank, (_, idx) in enumerate(everybody)
                    for token in (idx == expert).any(1).nonzero()[:, 0]
                ]
                order = torch.randperm(len(arrived), generator=self._shuffle).tolist()
                counts[slot] = len(arrived)
                for row, place in enumerate(order):
                    rank, token = arrived[place]
                    source[slot, row] = torch.tensor((rank, token))
                    _put(everybody[rank][0][token], packed[slot], scales, slot, row)

        if not return_recv_hook:
            receive()
        handle = (source, counts, most, x.shape[1], num_experts)
        received: Received = packed if scales is None else (packed, scales)
        return received, counts, handle, None, receive if return_recv_hook else None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,  # noqa: ANN401
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, None, None]:
        """Weighted sums in float32, one choice after the other."""
        self.calls.append("low_latency_combine")
        source, counts, most, hidden, num_experts = handle
        assert not any((use_logfmt, zero_copy, async_finish, return_recv_hook))
        assert bool((counts >= 0).all()), "combined without receiving"
        num_slots = num_experts // self.size
        assert x.shape == (num_slots, self.size * most, hidden)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape
        self._use_memory(most, hidden, num_experts)
        everybody: Any = self.meeting.swap(self.rank, (x, source, counts))
        self._num_in_flight -= 1
        out = torch.zeros(len(topk_idx), hidden)
        for token, choices in enumerate(topk_idx.tolist()):
            for choice, expert in enumerate(choices):
                if expert < 0:
                    continue
                theirs, their_source, their_counts = everybody[expert // num_slots]
                slot = expert % num_slots
                is_ours = their_source[slot, : their_counts[slot]] == torch.tensor(
                    (self.rank, token)
                )
                (row,) = is_ours.all(1).nonzero()[:, 0].tolist()
                out[token] += theirs[slot, row].float() * topk_weights[token, choice]
        self.meeting.swap(self.rank, None)  # before anybody writes into `x` again
        return out.to(torch.bfloat16), None, None

    def _use_memory(self, num_tokens: int, hidden: int, num_experts: int) -> None:
        assert self.low_latency_mode
        assert num_experts % self.size == 0
        assert num_experts // self.size <= self.num_qps
        assert low_latency_size(num_tokens, hidden, self.size, num_experts) <= self.num_rdma_bytes
        assert not self.is_dirty, "the normal mode has left its rows on the signals"
        assert self._num_experts in (0, num_experts), "the signals are elsewhere"
        self._num_experts = num_experts


def _empty_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and scales whose rows are contiguous in memory."""
    num_slots, capacity, hidden = rows.shape
    values = torch.full(rows.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((num_slots, hidden // 128, capacity), float("nan"))
    return values, scales.transpose(1, 2)


def _put(
    row: torch.Tensor, block: torch.Tensor, scales: torch.Tensor | None, slot: int, place: int
) -> None:
    if scales is None:
        block[place] = row
        return
    groups = row.float().view(-1, 128)
    peak = groups.abs().amax(1).clamp_min(LEAST_PEAK)
    values = (groups * (LARGEST / peak)[:, None]).to(torch.float8_e4m3fn)
    block.view(torch.uint8)[place] = values.view(torch.uint8).flatten()
    scales[slot, place] = peak / LARGEST
