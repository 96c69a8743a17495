"""What DeepEP 1.2 can be asked for: its kernels are compiled for some shapes only."""

from ep.dispatch.buffer_plan import NVLINK_PEERS, QUEUE_ROWS
from ep.dispatch.dispatch_needs import DispatchNeeds

LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
MOST_CHOICES = 11
MOST_SLOTS = 1024
# Each warp copies half a row through this much shared memory, and counts beside it.
MOST_NORMAL_HIDDEN = 8192 - 8
# A warp group an expert, fewer than 15 of them on each of the device's multiprocessors.
MOST_LOW_LATENCY_EXPERTS = 14 * 132
SCALE_GROUP = 128


def refusal(needs: DispatchNeeds, num_ranks: int) -> str:
    """Why DeepEP cannot serve a group of this size with this; "" when it can."""
    if num_ranks not in QUEUE_ROWS:
        known = ", ".join(map(str, QUEUE_ROWS))
        return f"it knows groups of {known} ranks, not of {num_ranks}"
    if needs.itemsize != 2:
        return "it moves bfloat16 only"
    if needs.hidden % SCALE_GROUP or needs.hidden > MOST_NORMAL_HIDDEN:
        return f"rows of {needs.hidden} values do not fit its queues"
    if needs.slots_per_rank > MOST_SLOTS:
        return f"{needs.slots_per_rank} experts a rank are more than {MOST_SLOTS}"
    if not needs.masked_tokens:
        return ""
    if needs.hidden not in LOW_LATENCY_HIDDEN:
        known = ", ".join(map(str, LOW_LATENCY_HIDDEN))
        return f"its low-latency kernels know rows of {known} values, not of {needs.hidden}"
    if needs.num_choices > MOST_CHOICES:
        return f"{needs.num_choices} experts a token are more than {MOST_CHOICES}"
    if num_ranks * needs.slots_per_rank > MOST_LOW_LATENCY_EXPERTS:
        most = MOST_LOW_LATENCY_EXPERTS
        return f"{num_ranks * needs.slots_per_rank} experts a layer are more than {most}"
    return ""


def num_nodes(num_ranks: int) -> int:
    """That DeepEP takes a group for: it fills nodes with 8 ranks."""
    return max(1, num_ranks // NVLINK_PEERS)
