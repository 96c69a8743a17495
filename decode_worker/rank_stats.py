"""What a decode rank says of itself with every batch of messages."""

from collections.abc import Sequence
from typing import NamedTuple

from decode_worker.request import Phase
from decode_worker.state import RankState
from engine.messages import RankStats


class StepRecord(NamedTuple):
    """A step that is over. `seconds` from its begin, or from the end of the one in front of it
    if that came later, to its tokens."""

    seconds: float
    num_requests: int


def rank_stats(state: RankState, steps: Sequence[StepRecord], num_steps: int) -> RankStats:
    """`steps` since the last batch, `num_steps` in all."""
    totals, counts = state.totals, state.pool.counts()
    waiting = state.of_phase(Phase.WAITING)
    return RankStats(
        num_running=len(state.of_phase(Phase.RUNNING)),
        num_waiting=len(waiting),
        num_transferring=state.num_prefilling,
        num_waiting_tokens=sum(len(request.tokens) for request in waiting),
        pages_total=counts.total,
        pages_free=counts.free,
        pages_owned=counts.owned,
        pages_cached=counts.cached,
        pages_quarantined=counts.quarantined,
        num_steps=num_steps,
        step_seconds=tuple(step.seconds for step in steps),
        batch_sizes=tuple(step.num_requests for step in steps),
        tokens_transferred_total=totals.tokens_transferred,
        tokens_generated_total=totals.tokens_generated,
        kv_bytes_total=totals.kv_bytes,
        kv_seconds=tuple(state.kv_waits),
        kv_failures_total=totals.kv_failures,
        preemptions_total=totals.preemptions,
    )
