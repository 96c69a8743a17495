"""The buffers of DeepEP in this process: one set, for all layers and all models of an EP group.

Two modes share them. The normal mode sends queues of rows and counts on the host; the low-latency
mode writes straight into two receive buffers in turn, whose signals have to be zero before they
are used. It zeroes the signals of one while it uses the other, so that nothing needs to be done as
long as all calls agree on where the signals are: on the layout. Another layout, and rows of the
normal mode between nodes, which use the same memory, ask for a cleaning in between.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import Unavailable
from core.log import get_logger
from ep.dispatch.buffer_plan import NUM_CHANNELS, low_latency_bytes, nvlink_bytes, rdma_bytes
from ep.dispatch.deep_ep_comm import DeepEpComm
from ep.dispatch.deep_ep_limits import num_nodes, refusal
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.group.group import EpGroup

log = get_logger("ep.deep_ep")

# Dispatches of the low-latency mode whose results are not combined yet.
MOST_OPEN = 2
LEAST_QUEUE_DEPTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the low-latency mode has what in its memory, and what it cleans."""

    max_tokens: int
    hidden: int
    num_experts: int


class DeepEpBuffer:
    """All ranks make the same calls in the same order. `raw` is DeepEP's own `Buffer`."""

    def __init__(self, library: Any, group: EpGroup, needs: Sequence[DispatchNeeds]) -> None:  # noqa: ANN401
        """`library` is the module `deep_ep`; the buffers serve each of `needs`, one a model.
        ValueError for what DeepEP cannot do. RuntimeError is DeepEP's own, as where the installed
        one is too old for a group of this size; peers may be left waiting, so that the process can
        only end."""
        for each in needs:
            reason = refusal(each, group.size)
            if reason:
                raise ValueError(f"DeepEP does not fit: {reason}")
        self.library = library
        self.group = group
        self.sizes = Sizes.of(library, group.size, needs)
        self._num_open = 0
        self._layout: Layout | None = None  # that the signals are zero for; None: for any
        self._captured: Layout | None = None  # of the graphs, which keep to it
        self._is_clean = True
        _leave_room_in_queues(max(each.masked_tokens for each in needs))
        self.raw = library.Buffer(
            None,
            num_nvl_bytes=self.sizes.nvlink_bytes,
            num_rdma_bytes=self.sizes.rdma_bytes,
            low_latency_mode=self.sizes.low_latency,
            num_qps_per_rank=self.sizes.num_qps,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=True,
            comm=DeepEpComm(group),
        )

    @property
    def dispatch_config(self) -> Any:  # noqa: ANN401
        return self.library.Buffer.get_dispatch_config(self.group.size)

    @property
    def combine_config(self) -> Any:  # noqa: ANN401
        return self.library.Buffer.get_combine_config(self.group.size)

    def begin_low_latency(self, layout: Layout) -> None:
        """Before every low-latency dispatch. Asserts that no more than two results of them
        are in use, which is how many buffers there are. ValueError for another layout than that of
        a graph: its replays would not see that signals lie elsewhere by now."""
        assert self._num_open < MOST_OPEN, "a third dispatch before the first one is combined"
        if self._captured not in (None, layout):
            raise ValueError(
                f"DeepEP's buffers serve CUDA graphs with {self._captured}, and cannot serve "
                f"{layout} beside them"
            )
        if _captures():
            self._captured = layout
        if not self._is_clean or self._layout not in (None, layout):
            self._clean(layout)
        self._layout = layout
        self._num_open += 1

    def end_low_latency(self) -> None:
        """After every low-latency combine."""
        assert self._num_open, "combined twice"
        self._num_open -= 1

    def end_normal(self) -> None:
        """After every combine of the normal mode: between nodes it has left its rows in the
        memory of the low-latency mode. Cleaned here, because a captured dispatch cannot."""
        if num_nodes(self.group.size) > 1:
            self._is_clean = False
            if self._layout is not None:
                self._clean(self._layout)

    def close(self) -> None:
        """When all ranks come here; without the peers that are lost, nothing is given back: the
        process ends, and its memory with it."""
        try:
            self.group.exchange((self._num_open,))
        except Unavailable as error:
            log.warning("DeepEP's buffers are left as they are", reason=error.message)
            return
        self.raw.destroy()

    def _clean(self, layout: Layout) -> None:
        assert not self._num_open, "another layout, with a dispatch that is not combined"
        assert not _captures(), "a captured graph would keep to a layout that is not in force"
        self.raw.clean_low_latency_buffer(layout.max_tokens, layout.hidden, layout.num_experts)
        self._is_clean = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of both buffers, as planned or as the library asks for, whichever is more."""

    nvlink_bytes: int
    rdma_bytes: int
    low_latency: bool
    num_qps: int

    @classmethod
    def of(cls, library: Any, num_ranks: int, needs: Sequence[DispatchNeeds]) -> "Sizes":  # noqa: ANN401
        nvlink, rdma = 0, 0
        num_qps = max(each.slots_per_rank for each in needs)
        for each in needs:
            if not each.masked_only:
                row, configs = 2 * each.hidden, _configs(library, num_ranks)
                hints = [config.get_nvl_buffer_size_hint(row, num_ranks) for config in configs]
                nvlink = max(nvlink, nvlink_bytes(each.hidden, num_ranks), *hints)
                hints = [config.get_rdma_buffer_size_hint(row, num_ranks) for config in configs]
                rdma = max(rdma, rdma_bytes(each.hidden, num_ranks), *hints)
                num_qps = max(num_qps, 2 * NUM_CHANNELS)
            if each.masked_tokens:
                num_experts = num_ranks * each.slots_per_rank
                rdma = max(
                    rdma,
                    low_latency_bytes(each.hidden, num_experts, each.masked_tokens),
                    library.Buffer.get_low_latency_rdma_size_hint(
                        each.masked_tokens, each.hidden, num_ranks, num_experts
                    ),
                )
        low_latency = any(each.masked_tokens for each in needs)
        return cls(
            nvlink_bytes=nvlink, rdma_bytes=rdma, low_latency=low_latency, num_qps=num_qps
        )  # fmt: skip


def _configs(library: Any, num_ranks: int) -> tuple[Any, Any]:  # noqa: ANN401
    """Of a dispatch and of a combine. RuntimeError where the library knows none."""
    try:
        buffer = library.Buffer
        return buffer.get_dispatch_config(num_ranks), buffer.get_combine_config(num_ranks)
    except AssertionError as error:
        raise RuntimeError(f"the installed DeepEP has no normal mode here: {error}") from error


def _leave_room_in_queues(max_tokens: int) -> None:
    """NVSHMEM does not look whether a queue of sends is full: it must have room for all of a
    dispatch and of what follows it."""
    depth = LEAST_QUEUE_DEPTH
    while depth < 2 * (max_tokens + 1):
        depth *= 2
    os.environ.setdefault("NVSHMEM_QP_DEPTH", str(depth))


def _captures() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
