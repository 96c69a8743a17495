"""How much memory DeepEP (`sgl-deep-ep` 0.1.2) asks for, as its sources have it."""

from dataclasses import dataclass

import torch

# ranks: rows sent at once and queued, over NVLink and over RDMA
DISPATCH = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128),
    24: (32, 288, 8, 128), 32: (32, 288, 8, 128), 48: (32, 288, 8, 128), 64: (32, 288, 8, 128),
    96: (20, 480, 12, 128), 128: (20, 560, 12, 128), 144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}  # fmt: skip
COMBINE = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128),
    24: (1, 288, 8, 128), 32: (1, 288, 8, 128), 48: (1, 288, 8, 128), 64: (1, 288, 8, 128),
    96: (1, 480, 8, 128), 128: (1, 560, 8, 128), 144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}  # fmt: skip
NUM_SMS = 20
PER_ROW = 128 * 8 + 128 * 4 + 128 * 4  # choices, their weights, scales


@dataclass(frozen=True)
class Config:
    num_sms: int
    nvl_sent: int
    nvl_queued: int
    rdma_sent: int
    rdma_queued: int

    @classmethod
    def recommended(cls, num_ranks: int, what: str) -> "Config":
        table = DISPATCH if what == "dispatch" else COMBINE
        assert num_ranks in table, f"Unsupported number of EP ranks: {num_ranks}"
        nvl_sent, nvl_queued, rdma_sent, rdma_queued = table[num_ranks]
        rdma_queued += -rdma_queued % rdma_sent
        return cls(NUM_SMS, nvl_sent, nvl_queued, rdma_sent, rdma_queued)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        queues = self.num_sms // 2 * min(num_ranks, 8)
        total = queues * (2 * max(num_ranks // 8, 1) + 3) * 4
        for row in (hidden_bytes, 8, PER_ROW):
            total += queues * self.nvl_queued * row
        return (total + 127) // 128 * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        if num_ranks <= 8:
            return 0
        queues = self.num_sms // 2 * (num_ranks // 8)
        total = queues * (8 * 2 + 2) * 2 * 4
        for row in (hidden_bytes, 8, PER_ROW, 16):
            total += queues * self.rdma_queued * row * 2
        return (total + 127) // 128 * 128


def low_latency_size(num_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    assert num_experts % num_ranks == 0
    scales = hidden // 128
    sent_row = 16 + max(hidden * 2, hidden + scales * 4)
    back_row = scales * 4 + hidden * 2
    total = 2 * max(num_tokens * sent_row, num_experts * num_tokens * back_row)
    total += 2 * max(num_experts * num_tokens * sent_row, num_experts * num_tokens * back_row)
    total += 2 * ((num_experts * 4 + 127) // 128 * 128)
    return (total + 128) // 128 * 128


def normal_bytes(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    config: Config,
    num_ranks: int,
) -> int:
    """That a dispatch within a node needs."""
    queues = config.num_sms // 2 * min(num_ranks, 8)
    row = values.shape[1] * values.element_size() + 4 + topk_idx.shape[1] * (8 + 4)
    row += 0 if scales is None else scales.shape[1] * 4
    return num_ranks * num_ranks * 4 + queues * (16 + config.nvl_queued * row)
