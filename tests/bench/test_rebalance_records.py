"""What the rebalance bench makes of its phases."""

from bench.rebalance import Observation, records
from loadgen.records import BenchRun

RUN = BenchRun(date="2026-01-01T00:00:00+00:00", commit="c", gpu="cpu", bench="rebalance")


def test_phases_are_held_against_the_first() -> None:
    phases = {
        "quiet": Observation(gaps=[0.01] * 99 + [0.2]),
        "moving": Observation(
            gaps=[0.02] * 100, num_rebalances=4, num_bytes=2_000_000_000, moving_seconds=2.0
        ),
    }
    found = {(one.case, one.metric): one for one in records(RUN, phases, "4 ranks")}
    quiet = found["4 ranks, quiet", "inter_token_latency_p99"]
    assert (quiet.peer, quiet.peer_value) == (None, None)
    moving = found["4 ranks, moving", "inter_token_latency_p50"]
    assert (moving.value, moving.peer_value) == (0.02, 0.01)
    assert found["4 ranks, moving", "inter_token_latency_p99"].peer_value == quiet.value
    assert found["4 ranks, moving", "rebalance_mean"].value == 0.5
    assert found["4 ranks, moving", "moved"].value == 1.0
