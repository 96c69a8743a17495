"""What DeepEP can be asked for: its kernels are compiled for some shapes only.

The numbers are those of `sgl-deep-ep` 0.1.2 (`csrc/legacy/buffer.hpp`, `csrc/kernels/legacy` of
DeepEP). Its normal mode knows some numbers of nodes, the low-latency mode any.
"""

from ep.dispatch.buffer_plan import NVLINK_PEERS, QUEUE_ROWS, low_latency_bytes, rdma_bytes
from ep.dispatch.dispatch_needs import DispatchNeeds

LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
MOST_CHOICES = 11
# A thread an expert counts what comes: 128 in a kernel within a node, 512 in one between nodes, of
# all experts of a node.
MOST_SLOTS, MOST_SLOTS_BETWEEN_NODES = 128, 512 // NVLINK_PEERS
# Each warp copies half a row through this much shared memory, and counts beside it.
MOST_NORMAL_HIDDEN = 8192 - 8
# A warp group an expert, fewer than 15 of them on each of the device's multiprocessors.
MOST_LOW_LATENCY_EXPERTS = 14 * 132
SCALE_GROUP = 128
# Buffers are addressed in 16 bytes each, between nodes in the normal mode in one, by an int32.
_MOST_UNITS, _UNIT_BYTES = 2**31 - 1, 16


def refusal(needs: DispatchNeeds, num_ranks: int) -> str:
    """Why DeepEP cannot serve a group of this size with this; "" when it can."""
    if num_ranks not in (2, 4) and (num_ranks < NVLINK_PEERS or num_ranks % NVLINK_PEERS):
        return (
            f"it serves groups of 2, 4 or whole nodes of {NVLINK_PEERS} ranks, not of {num_ranks}"
        )
    if needs.itemsize != 2:
        return "it moves bfloat16 only"
    if needs.hidden % SCALE_GROUP:
        return f"rows of {needs.hidden} values are not whole groups of {SCALE_GROUP}"
    return _normal_refusal(needs, num_ranks) or _low_latency_refusal(needs, num_ranks)


def _normal_refusal(needs: DispatchNeeds, num_ranks: int) -> str:
    if needs.masked_only:
        return ""
    if num_ranks not in QUEUE_ROWS:
        known = ", ".join(str(each // NVLINK_PEERS) for each in QUEUE_ROWS if each >= NVLINK_PEERS)
        return (
            f"its normal mode, which prefill needs, is compiled for {known} nodes of "
            f"{NVLINK_PEERS} ranks, not for {num_nodes(num_ranks)} ({num_ranks} ranks)"
        )
    if needs.hidden > MOST_NORMAL_HIDDEN:
        return f"rows of {needs.hidden} values do not fit its queues"
    most = MOST_SLOTS if num_nodes(num_ranks) == 1 else MOST_SLOTS_BETWEEN_NODES
    if needs.slots_per_rank > most:
        return f"{needs.slots_per_rank} experts a rank are more than {most}"
    heap = max(rdma_bytes(needs.hidden, num_ranks), _low_latency_heap(needs, num_ranks))
    if num_nodes(num_ranks) > 1 and heap > _MOST_UNITS:
        return f"both of its modes share {heap} bytes, of which one reaches 2 GiB"
    return ""


def _low_latency_refusal(needs: DispatchNeeds, num_ranks: int) -> str:
    if not needs.masked_tokens:
        return ""
    if needs.hidden not in LOW_LATENCY_HIDDEN:
        known = ", ".join(map(str, LOW_LATENCY_HIDDEN))
        return f"its low-latency kernels know rows of {known} values, not of {needs.hidden}"
    if needs.num_choices > MOST_CHOICES:
        return f"{needs.num_choices} experts a token are more than {MOST_CHOICES}"
    num_experts = num_ranks * needs.slots_per_rank
    if num_experts > MOST_LOW_LATENCY_EXPERTS:
        return f"{num_experts} experts a layer are more than {MOST_LOW_LATENCY_EXPERTS}"
    if _low_latency_heap(needs, num_ranks) > _MOST_UNITS * _UNIT_BYTES:
        return f"{needs.masked_tokens} tokens a rank are more than its low-latency buffers hold"
    return ""


def _low_latency_heap(needs: DispatchNeeds, num_ranks: int) -> int:
    if not needs.masked_tokens:
        return 0
    return low_latency_bytes(needs.hidden, num_ranks * needs.slots_per_rank, needs.masked_tokens)


def num_nodes(num_ranks: int) -> int:
    """That DeepEP takes a group for: it fills nodes with 8 ranks."""
    return max(1, num_ranks // NVLINK_PEERS)
