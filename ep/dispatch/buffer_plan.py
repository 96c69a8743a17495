"""What dispatchers allocate, term by term, before they do it.

The sizes of DeepEP's buffers are those of `sgl-deep-ep` 0.1.2; a buffer is made no smaller than
what the installed library asks for. What arrives is counted at its worst: everybody's tokens, and
of the rows that these become as many as `row_caps` lets through at once.
"""

from dataclasses import replace

from core.memory_term import MemoryTerm
from ep.dispatch.dispatch_needs import DispatchNeeds

ALIGNMENT = 128
NVLINK_PEERS = 8  # ranks of a node, where there are several nodes
NUM_CHANNELS = 10  # half of the multiprocessors that the kernels of the normal mode take
WORKSPACE_BYTES = 32 << 20
# NVSHMEM takes memory from the device in pieces of this size.
HEAP_BYTES = 512 << 20
# ranks: rows of a receive queue over NVLink, and over RDMA. The normal mode is compiled for these.
QUEUE_ROWS = {
    2: (256, 0), 4: (256, 0), 8: (256, 0), 16: (288, 140), 24: (288, 128), 32: (288, 128),
    48: (288, 128), 64: (288, 140), 96: (480, 132), 128: (560, 132), 144: (720, 132),
    160: (720, 132),
}  # fmt: skip
_MOST_CHOICES, _MOST_SCALES = 128, 128  # that a queue has room for in a row
_SOURCE_BYTES = 8  # of a row: where it came from
_SCALE_GROUP = 128


def nvlink_bytes(hidden: int, num_ranks: int) -> int:
    """Of the queues of the normal mode within a node."""
    rows, _ = QUEUE_ROWS[num_ranks]
    num_nodes = max(1, num_ranks // NVLINK_PEERS)
    queues = NUM_CHANNELS * min(num_ranks, NVLINK_PEERS)
    row = 2 * hidden + _SOURCE_BYTES + _MOST_CHOICES * (8 + 4) + _MOST_SCALES * 4
    return _aligned(queues * ((2 * num_nodes + 3) * 4 + rows * row))


def rdma_bytes(hidden: int, num_ranks: int) -> int:
    """Of the queues of the normal mode between nodes; 0 within one."""
    _, rows = QUEUE_ROWS[num_ranks]
    if num_ranks <= NVLINK_PEERS:
        return 0
    queues = NUM_CHANNELS * (num_ranks // NVLINK_PEERS) * 2
    row = 2 * hidden + _SOURCE_BYTES + _MOST_CHOICES * (8 + 4) + _MOST_SCALES * 4 + 16
    return _aligned(queues * ((NVLINK_PEERS * 2 + 2) * 4 + rows * row))


def low_latency_terms(hidden: int, num_experts: int, masked_tokens: int) -> tuple[MemoryTerm, ...]:
    """Of the low-latency mode: two of each buffer, in turn. `num_experts` counts all slots of the
    group."""
    scales = hidden // _SCALE_GROUP
    sent = 16 + max(2 * hidden, hidden + 4 * scales)
    returned = 4 * scales + 2 * hidden
    most = num_experts * masked_tokens
    sizes = {
        "send": max(masked_tokens * sent, most * returned),
        "receive": most * max(sent, returned),
        "signal": _aligned(4 * num_experts),
    }
    return tuple(
        MemoryTerm(name=f"dispatch: low-latency {name} buffers", num_bytes=2 * num_bytes)
        for name, num_bytes in sizes.items()
    )


def low_latency_bytes(hidden: int, num_experts: int, masked_tokens: int) -> int:
    total = sum(term.num_bytes for term in low_latency_terms(hidden, num_experts, masked_tokens))
    return (total + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def deep_ep_terms(needs: DispatchNeeds, num_ranks: int) -> tuple[MemoryTerm, ...]:
    """All that a rank of `num_ranks` takes; KeyError for a number that DeepEP does not know."""
    hidden, is_normal = needs.hidden, not needs.masked_only
    terms = [MemoryTerm(name="dispatch: workspace", num_bytes=WORKSPACE_BYTES)]
    heap = 0
    if is_normal:
        queues = nvlink_bytes(hidden, num_ranks)
        terms.append(MemoryTerm(name="dispatch: NVLink queues", num_bytes=queues))
    if is_normal and num_ranks > NVLINK_PEERS:
        heap = rdma_bytes(hidden, num_ranks)
        terms.append(MemoryTerm(name="dispatch: RDMA queues", num_bytes=heap))
    if needs.masked_tokens:
        experts = num_ranks * needs.slots_per_rank
        low_latency = low_latency_terms(hidden, experts, needs.masked_tokens)
        terms += low_latency
        # Both modes take turns in one heap, as large as the larger needs it.
        low_latency_total = sum(term.num_bytes for term in low_latency)
        if heap:
            saved = -min(heap, low_latency_total)
            terms.append(MemoryTerm(name="dispatch: shared by both modes", num_bytes=saved))
        heap = max(heap, low_latency_total)
    if heap:
        rounding = -heap % HEAP_BYTES
        terms.append(MemoryTerm(name="dispatch: NVSHMEM heap rounding", num_bytes=rounding))
    if is_normal:
        # As they came, and the weighted sums that go back.
        arrived = 2 * num_ranks * needs.most_tokens * hidden * needs.itemsize
        terms.append(MemoryTerm(name="dispatch: received tokens", num_bytes=arrived))
        terms.append(_rows_by_expert(needs, num_ranks))
    elif needs.step_tokens > needs.masked_tokens:
        # Longer steps are not recorded: their parts do not share the memory of those that are.
        (rows,) = _masked_rows(needs, num_ranks)
        terms.append(replace(rows, name="dispatch: masked rows of long steps"))
    return (*terms, *_masked_rows(needs, num_ranks))


def collective_terms(needs: DispatchNeeds, num_ranks: int) -> tuple[MemoryTerm, ...]:
    """All that a rank of `num_ranks` takes for all-gathers and all-to-alls."""
    tokens = max(needs.most_tokens, needs.masked_tokens)
    row = needs.hidden * needs.itemsize + 4 * needs.num_choices
    gathered = MemoryTerm(
        name="dispatch: gathered tokens", num_bytes=(num_ranks + 1) * tokens * row
    )
    # Each choice of a token, or one sum for each rank: sent by this rank, and by the others.
    most = max(needs.num_choices, num_ranks)
    returned = MemoryTerm(
        name="dispatch: returned rows",
        num_bytes=2 * tokens * most * needs.hidden * needs.itemsize,
    )
    return (
        gathered, returned, _rows_by_expert(needs, num_ranks), *_masked_rows(needs, num_ranks)
    )  # fmt: skip


def local_terms(needs: DispatchNeeds) -> tuple[MemoryTerm, ...]:
    return (_rows_by_expert(needs, 1), *_masked_rows(needs, 1))


def _rows_by_expert(needs: DispatchNeeds, num_ranks: int) -> MemoryTerm:
    """For the experts of this rank and what they make of them, in one layer at a time."""
    rows = needs.most_rows(num_ranks)
    return MemoryTerm(
        name="dispatch: rows by expert", num_bytes=2 * rows * needs.hidden * needs.itemsize
    )


def _masked_rows(needs: DispatchNeeds, num_ranks: int) -> tuple[MemoryTerm, ...]:
    """The same in blocks of fixed size; none where there is no such form."""
    if not needs.masked_tokens:
        return ()
    rows = needs.slots_per_rank * num_ranks * needs.masked_tokens
    num_bytes = 2 * rows * needs.hidden * needs.itemsize
    return (MemoryTerm(name="dispatch: masked rows", num_bytes=num_bytes),)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
