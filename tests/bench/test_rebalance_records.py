"""What the rebalance bench makes of its phases."""

from bench.rebalance import Phase, records
from bench.records import Run

RUN = Run(date="2026-01-01T00:00:00+00:00", commit="c", gpu="cpu", bench="rebalance")


def test_phases_are_held_against_the_first() -> None:
    phases = {
        "before": Phase(gaps=[0.01] * 99 + [0.2]),
        "during": Phase(
            gaps=[0.02] * 100, num_rebalances=4, num_bytes=2_000_000_000, moving_seconds=2.0
        ),
        "after": Phase(gaps=[0.01] * 100),
    }
    found = {(one.case, one.metric): one for one in records(RUN, phases, "4 ranks")}
    before = found["4 ranks, before", "inter_token_latency_p99"]
    assert (before.peer, before.peer_value) == (None, None)
    during = found["4 ranks, during", "inter_token_latency_p50"]
    assert (during.value, during.peer_value) == (0.02, 0.01)
    assert found["4 ranks, after", "inter_token_latency_p99"].peer_value == before.value
    assert found["4 ranks, during", "rebalance_mean"].value == 0.5
    assert found["4 ranks, during", "moved"].value == 1.0
