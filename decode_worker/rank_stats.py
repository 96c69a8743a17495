"""What a decode rank says of itself with every batch of messages."""

from typing import NamedTuple

from decode_worker.inflight_step import InflightStep
from decode_worker.request import RequestPhase
from decode_worker.state import RankState
from engine.link.messages import RankStats


class StepRecord(NamedTuple):
    """A step that is over. `seconds` from its begin, or from the end of the one before it
    if that came later, to its tokens."""

    seconds: float
    num_requests: int
    num_tokens: int


class StepLog:
    """Steps that are over; `recent` until they are reported. `gap_seconds` is how long the device
    waited between steps, in all."""

    def __init__(self) -> None:
        self.recent: list[StepRecord] = []
        self.num_steps = 0
        self.gap_seconds = 0.0
        self._landed_at = 0.0
        self._last_seconds = 0.0
        self._last: InflightStep | None = None

    def landed(self, inflight: InflightStep, now: float) -> None:
        seconds = now - max(inflight.began, self._landed_at)
        self.recent.append(StepRecord(seconds, len(inflight.rows), inflight.num_tokens))
        self._last_seconds = seconds
        self.num_steps += 1
        if self._last is not None:
            self.gap_seconds += inflight.step.seconds_behind(self._last.step)
        self._last = inflight
        self._landed_at = now

    def expected_end(self, inflight: InflightStep) -> float:
        """When it is over if it takes as long as the last one did."""
        return max(inflight.began, self._landed_at) + self._last_seconds

    def rest(self) -> None:
        """There is nothing to do: that is no gap."""
        self._last = None


def rank_stats(state: RankState, log: StepLog) -> RankStats:
    """As of now."""
    totals, counts = state.totals, state.pool.counts()
    waiting = state.of_phase(RequestPhase.WAITING)
    return RankStats(
        num_running=len(state.of_phase(RequestPhase.RUNNING)),
        num_waiting=len(waiting),
        num_transferring=state.num_prefilling,
        num_waiting_tokens=sum(request.num_tokens for request in waiting),
        pages_total=counts.total,
        pages_free=counts.free,
        pages_owned=counts.owned,
        pages_cached=counts.cached,
        pages_quarantined=counts.quarantined,
        num_steps=log.num_steps,
        step_seconds=tuple(step.seconds for step in log.recent),
        batch_sizes=tuple(step.num_requests for step in log.recent),
        step_tokens=tuple(step.num_tokens for step in log.recent),
        tokens_transferred_total=totals.tokens_transferred,
        tokens_generated_total=totals.tokens_generated,
        kv_bytes_total=totals.kv_bytes,
        kv_seconds=tuple(state.kv_waits),
        kv_failures_total=totals.kv_failures,
        preemptions_total=totals.preemptions,
        drafts_proposed_total=tuple(totals.drafts_proposed),
        drafts_accepted_total=tuple(totals.drafts_accepted),
        step_gap_seconds_total=log.gap_seconds,
    )
