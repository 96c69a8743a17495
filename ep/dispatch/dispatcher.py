"""The seam between a MoE layer and the ranks that hold its experts.

`dispatch` sends each token to the ranks of its experts, `combine` brings the weighted sums
back; nothing but the frozen handle passes between the two. There are three forms of it:

    Dispatcher         rows by slot without gaps, their counts on the host
    AlignedDispatcher  rows by slot, each slot's part aligned, counts on the device: prefill on GPUs
    MaskedDispatcher   a padded block of rows for each slot, counts on the device, all sizes fixed
                       and nothing waits for the host: decode steps that are captured
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kernels.build.fp8_scales import GROUP


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


# Of a part: [M, H] in the layout of `DispatchedAligned.hidden`, and its handle.
Computed = tuple[torch.Tensor, object]
# values [T, H], and scales [T, H / 128] or None
Rows = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """What travels, as the expert layer wants it: hidden states in their own type, or FP8 e4m3
    with a float32 scale for each 128 of them, or without any: all of them have the `scale`, []
    float32, that the experts know."""

    quantises: bool = True
    scale: torch.Tensor | None = None

    PLAIN: ClassVar["Payload"]
    FP8: ClassVar["Payload"]

    def num_scales(self, width: int) -> int:
        """That travel with a row of so many values."""
        if not self.quantises or self.scale is not None:
            return 0
        return width // GROUP


Payload.PLAIN = Payload(quantises=False)
Payload.FP8 = Payload()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedAligned:
    """Tokens for the experts of this rank, or some of them, grouped by slot; a slot's rows begin at
    a multiple of the alignment, the slots follow each other in order.

    hidden   [M, H], M at least what is there; float8_e4m3fn if the payload was FP8
    scales   [M, H / 128] float32, or None if the payload has none
    counts   [slots_per_rank] int32, on the device, rows of each slot
    ends     [slots_per_rank] int32, on the device, where they end in `hidden`
    slot_of  [M] int32, on the device, -1: padding, whose row means nothing
    handle   what `combine_aligned` of the same dispatcher needs
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    ends: torch.Tensor
    slot_of: torch.Tensor
    handle: object


class AlignedDispatcher(Protocol):
    """As `Dispatcher`, with the rows' places on the device. What arrives on a rank comes in one
    part, or in several where it would become more rows than there is room for:

        parts = aligned.dispatch_aligned(...)
        out = aligned.combine_aligned(map(compute, parts))  # to (rows, part.handle)
    """

    def dispatch_aligned(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],  # T of every rank
        payload: Payload,
        alignment: int,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> Iterator[DispatchedAligned]:
        """Arguments as in `Dispatcher.dispatch`; `rows` are `hidden` as its payload, where that has
        been made already. All is sent when this returns; a part, of at least one, is made when it
        is asked for."""

    def combine_aligned(self, computed: Iterable[Computed]) -> torch.Tensor:
        """What the experts made of each part, in order -> [T, H], as `Dispatcher.combine`. A part
        is let go before the next is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedMasked:
    """Tokens for the experts of this rank, a block of C rows a slot (masked layout).

    hidden         [slots_per_rank, C, H], of which row i of slot s means something if
                   i < counts[s]; float8_e4m3fn if the payload was FP8
    scales         [slots_per_rank, C, H / 128] float32, or None if the payload has none, but for
                   dispatchers that quantise with scales of their own all the same
    counts         [slots_per_rank] int32, on the device
    handle         what `combine_masked` of the same dispatcher needs
    expected_rows  of a slot when the experts are chosen evenly, 0: unknown; among paths of equal
                   results a product picks by it
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    handle: object
    expected_rows: int = 0


class MaskedDispatcher(Protocol):
    """All sizes are fixed and nothing waits for the device, so that both calls can be part of a
    captured CUDA graph. Calls are in the same order on all ranks, with the same T."""

    @property
    def max_tokens(self) -> int:
        """The largest T: what buffers were made for. C is at most `max_tokens` times the ranks,
        rounded up to what a grouped product asks for."""

    def dispatch_masked(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids, -1: none; else distinct
        topk_weights: torch.Tensor,  # [T, K] float32
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchedMasked:
        """`meanwhile` as in `Dispatcher.dispatch`. ValueError for more than `max_tokens`, before
        anything is sent."""

    def combine_masked(
        self,
        expert_out: torch.Tensor,  # [slots_per_rank, C, H] in the layout of `hidden`
        handle: object,
        base: torch.Tensor | None = None,  # [T, H], what else a token is the sum of
    ) -> torch.Tensor:
        """[T, H], as `Dispatcher.combine`; a token without experts becomes zeros, or its base."""
