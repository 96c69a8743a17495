"""The seam between a MoE layer and the ranks that hold its experts.

`dispatch` sends each token to the ranks of its experts, `combine` brings the weighted sums
back; nothing but the frozen handle passes between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Tokens for the experts of this rank, grouped by slot (contiguous layout).

    hidden         [N, H], rows sorted by slot
    expert_counts  [slots_per_rank] int64 on the CPU, rows of each slot; sums to N
    handle         what `combine` of the same dispatcher needs
    """

    hidden: torch.Tensor
    expert_counts: torch.Tensor
    handle: object


class Dispatcher(Protocol):
    """One instance a process; calls are in the same order on all ranks of the group."""

    def dispatch(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],  # T of every rank
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        """`meanwhile` is called once, while tokens travel: what else there is to compute. It
        raises only to end the process: peers wait for what would follow."""

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[N, H] rows in the order of `Dispatched.hidden` -> [T, H], each token the sum over
        its K experts of weight times output, accumulated in FP32."""
