"""The seam between a MoE layer and the ranks that hold its experts.

`dispatch` sends each token to the ranks of its experts, `combine` brings the weighted sums
back; nothing but the frozen handle passes between the two. There are two forms of it: contiguous
rows with their counts on the host (`Dispatcher`), and, where the host must not wait and all sizes
are fixed, a padded block of rows for each slot with the counts on the device (`MaskedDispatcher`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
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


class Payload(Enum):
    """What travels, as the expert layer wants it: hidden states in their own type, or FP8 e4m3
    with a float32 scale for each 128 of them."""

    PLAIN = "plain"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedMasked:
    """Tokens for the experts of this rank, a block of C rows a slot (masked layout).

    hidden   [slots_per_rank, C, H], of which row i of slot s means something if i < counts[s];
             float8_e4m3fn if the payload was FP8
    scales   [slots_per_rank, C, H / 128] float32, or None if the payload was plain
    counts   [slots_per_rank] int32, on the device
    handle   what `combine_masked` of the same dispatcher needs
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    handle: object


class MaskedDispatcher(Protocol):
    """All sizes are fixed and nothing waits for the device, so that both calls can be part of a
    captured CUDA graph. Calls are in the same order on all ranks, with the same T."""

    @property
    def max_tokens(self) -> int:
        """The largest T: what buffers were made for. C is at most `max_tokens` times the ranks."""

    def dispatch_masked(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids, -1: nobody
        topk_weights: torch.Tensor,  # [T, K] float32
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchedMasked:
        """`meanwhile` as in `Dispatcher.dispatch`. ValueError for more than `max_tokens`."""

    def combine_masked(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[slots_per_rank, C, H] in the layout of `DispatchedMasked.hidden` -> [T, H], as
        `Dispatcher.combine`; a token without experts becomes zeros."""
