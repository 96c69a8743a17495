"""What is counted of steps that are over."""

import pytest

from decode_worker.inflight_step import InflightStep
from decode_worker.rank_stats import StepLog, StepRecord, rank_stats
from engine.step.pending_step import PendingStep
from engine.step.step_mark import StepMark
from tests.decode_worker.books import make_state


def inflight(
    began: float, computed_from: float, computed_to: float, num_requests: int = 2
) -> InflightStep:
    step = PendingStep([True] * num_requests, lambda job: job())
    step._began, step._ended = StepMark(seconds=computed_from), StepMark(seconds=computed_to)
    rows = {f"r{row}": row for row in range(num_requests)}
    return InflightStep(step=step, rows=rows, chunks=(), num_tokens=7, began=began)


def test_seconds_and_gaps() -> None:
    log = StepLog()
    log.landed(inflight(1.0, 1.5, 3.0), now=3.5)
    # Launched before that one landed; its device began with it a quarter of a second later.
    log.landed(inflight(2.0, 3.25, 5.0, num_requests=3), now=5.5)
    assert log.recent == [StepRecord(2.5, 2, 7), StepRecord(2.0, 3, 7)]
    assert log.gap_seconds == pytest.approx(0.25)
    log.landed(inflight(6.0, 5.0, 7.0), now=7.25)  # nothing in between
    assert log.gap_seconds == pytest.approx(0.25)
    log.rest()
    log.landed(inflight(20.0, 20.5, 21.0), now=21.0)  # nobody wanted anything for so long
    assert log.gap_seconds == pytest.approx(0.25)
    log.recent.clear()
    stats = rank_stats(make_state(), log)
    assert (stats.num_steps, stats.step_seconds) == (4, ())
    assert stats.step_gap_seconds_total == pytest.approx(0.25)
