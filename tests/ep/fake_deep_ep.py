"""A twin of DeepEP's Python interface on the CPU, for ranks that are threads.

It is as strict as the real one about shapes, dtypes and sizes of buffers, packs rows and scales as
that does, shuffles what comes in no certain order there, and fills what nobody has written with
NaN. What would only show as a hang or as wrong numbers on GPUs (a signal that is not zero, a third
dispatch in flight, a hook that was not called) is an error here.
"""

from types import SimpleNamespace
from typing import Any

import torch

from tests.ep.fake_deep_ep_low_latency import LowLatency
from tests.ep.fake_deep_ep_sizes import NUM_SMS, Config, low_latency_size, normal_bytes
from tests.ep.thread_ranks import Meeting

HANDLE_BYTES = 64  # of CUDA's inter-process memory handles
UNIQUE_ID_BYTES = 128
MOST_LOCAL_EXPERTS = 1024
MOST_NODES = 20
INT_MAX = 2**31 - 1

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Event:
    def __init__(self) -> None:
        self.num_waits = 0

    def current_stream_wait(self) -> None:
        self.num_waits += 1


class FakeBuffer(LowLatency):
    """`calls` are the names of what was called, in order."""

    meeting: Meeting  # set by `fake_deep_ep`

    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,  # noqa: ANN401
    ) -> None:
        assert group is None
        assert comm is not None
        assert allow_nvlink_for_low_latency_mode
        assert not allow_mnnvl
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        assert num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0
        assert num_nvl_bytes <= INT_MAX or num_rdma_bytes == 0
        assert low_latency_mode or num_rdma_bytes <= INT_MAX
        assert self.size < 8 or self.size % 8 == 0
        assert self.size <= 8 * MOST_NODES or low_latency_mode
        assert not num_rdma_bytes or self.size > 8 or low_latency_mode
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.num_qps = low_latency_mode, num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.calls: list[str] = []
        self.begin_low_latency()
        assert comm.allgather(self.rank) == list(range(self.size))
        handles = comm.allgather(bytearray([self.rank] * HANDLE_BYTES))
        assert handles == [bytearray([rank] * HANDLE_BYTES) for rank in range(self.size)]
        if low_latency_mode or self.size > 8:
            first = self.rank == 0
            ids = comm.allgather(bytearray(range(UNIQUE_ID_BYTES)) if first else None)
            assert ids == [bytearray(range(UNIQUE_ID_BYTES))] + [None] * (self.size - 1)

    @staticmethod
    def capture() -> Event:
        return Event()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config.recommended(num_ranks, "dispatch")

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config.recommended(num_ranks, "combine")

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_tokens: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_size(num_tokens, hidden, num_ranks, num_experts)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.calls.append("destroy")
        self.meeting.swap(self.rank, None)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Event]:
        self.calls.append("layout")
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        assert num_experts % self.size == 0
        rank_of = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.size))
        is_in_rank = torch.stack([(rank_of == r).any(1) for r in range(self.size)], dim=1)
        chosen = topk_idx[topk_idx >= 0]
        per_node = None
        if self.size > 8:
            in_node = is_in_rank.view(len(topk_idx), -1, 8).any(2)
            per_node = in_node.sum(0).int()
        return (
            is_in_rank.sum(0).int(),
            per_node,
            torch.bincount(chosen, minlength=num_experts).int(),
            is_in_rank,
            Event(),
        )

    def dispatch(
        self,
        x: Rows,
        handle: None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor, torch.Tensor, list[int], object, Event]:
        self.calls.append("dispatch")
        assert handle is None
        assert num_worst_tokens == 0
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert (num_tokens_per_rdma_rank is not None) == (self.size > 8)
        assert self.size <= 8 or self.num_qps == NUM_SMS // 2 or self.num_qps >= NUM_SMS
        assert self.size <= 8 or self.num_rdma_bytes < INT_MAX
        values, scales = x if isinstance(x, tuple) else (x, None)
        self._check_rows(values, scales, topk_idx, topk_weights)
        num_experts = len(num_tokens_per_expert)
        assert num_experts // self.size <= MOST_LOCAL_EXPERTS
        config = config or self.get_dispatch_config(self.size)
        assert normal_bytes(values, scales, topk_idx, config, self.size) <= self.num_nvl_bytes
        everybody: Any = self.meeting.swap(
            self.rank, (values, scales, topk_idx, topk_weights, is_token_in_rank)
        )
        if self.size > 8:
            self.is_dirty = True
        here = [sent[4][:, self.rank] for sent in everybody]

        def gathered(part: int) -> torch.Tensor:
            return torch.cat(
                [_take(sent[part], mask) for sent, mask in zip(everybody, here, strict=True)]
            )

        first = self.rank * (num_experts // self.size)
        slots = gathered(2) - first
        is_mine = (slots >= 0) & (slots < num_experts // self.size)
        slots = torch.where(is_mine, slots, -1)
        counts = torch.bincount(slots[is_mine], minlength=num_experts // self.size)
        counts = -(-counts // expert_alignment) * expert_alignment
        received: Rows = gathered(0)
        if scales is not None:
            received = (received, gathered(1))
        source = [int(mask.sum()) for mask in here]
        raw = SimpleNamespace(source=source, is_token_in_rank=is_token_in_rank)
        weights = torch.where(is_mine, gathered(3), 0.0)
        return received, slots, weights, counts.tolist(), raw, Event()

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,  # noqa: ANN401
        topk_weights: None = None,
        bias: None = None,
        config: Config | None = None,
    ) -> tuple[torch.Tensor, None, Event]:
        """Adds up what the ranks return for each token, in float32."""
        self.calls.append("combine")
        assert topk_weights is None
        assert bias is None
        assert config is not None
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert len(x) == sum(handle.source)
        everybody: Any = self.meeting.swap(self.rank, x.split(handle.source))
        is_in_rank = handle.is_token_in_rank
        total = torch.zeros(len(is_in_rank), x.shape[1])
        for rank, parts in enumerate(everybody):
            total[is_in_rank[:, rank]] += parts[self.rank].float()
        return total.to(x.dtype), None, Event()

    def _check_rows(
        self,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        assert values.dim() == 2
        assert values.is_contiguous()
        assert values.shape[1] * values.element_size() % 32 == 0
        assert values.shape[1] * values.element_size() // 2 + 8 <= 8192
        assert topk_idx.shape == topk_weights.shape
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert len(values) == len(topk_idx)
        if scales is None:
            assert values.dtype == torch.bfloat16
            return
        assert values.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
        assert scales.dim() == 2
        assert len(scales) == len(values)
        # What lies behind them in a row between nodes is read as 8 bytes.
        assert self.size <= 8 or scales.shape[1] % 2 == 0


def _take(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.float8_e4m3fn:
        return rows.view(torch.uint8)[mask].view(rows.dtype)
    return rows[mask]


def fake_deep_ep(meeting: Meeting) -> Any:  # noqa: ANN401
    """What `import deep_ep` gives, for the ranks that meet there."""
    buffer = type("Buffer", (FakeBuffer,), {"meeting": meeting})
    return SimpleNamespace(Buffer=buffer, Config=Config)
