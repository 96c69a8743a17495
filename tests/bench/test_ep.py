"""The bench of dispatchers: what it records, and that it runs."""

import pytest
import torch

from bench import ep
from bench.ep import Times, records_of
from loadgen.records import BenchRun

RUN = BenchRun(date="", commit="", gpu="", bench="ep")


def times(case: str, dispatch: float, combine: float, captured: float = 0.0) -> Times:
    return Times(
        case=case,
        dispatch=dispatch,
        combine=combine,
        captured=captured,
        dispatch_bytes=8e6,
        combine_bytes=16e6,
    )


def test_the_slowest_rank_counts_and_raw_calls_are_the_peer() -> None:
    ranks = [
        [
            times("deep_ep masked, FP8", 30 + rank, 40 - rank, 61),
            times("deep_ep masked, raw, FP8", 29, 38, 60),
            times("deep_ep contiguous, BF16", 100, 200),
        ]
        for rank in range(2)
    ]
    found = {(one.case, one.metric): one for one in records_of(RUN, ranks)}
    masked = "deep_ep masked, FP8"
    assert found[masked, "round_trip"].value == 31 + 40
    assert found[masked, "round_trip"].peer_value == 29 + 38
    assert found[masked, "captured"].peer == "DeepEP"
    assert found[masked, "combine_rate"].value == 16e6 / 40 / 1e3
    contiguous = "deep_ep contiguous, BF16"
    assert found[contiguous, "dispatch"].peer is None
    assert (contiguous, "captured") not in found
    assert not any("raw" in case for case, _ in found)


@pytest.mark.slow
def test_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert ep.main(["--ranks", "2", "--tokens", "1", "3"]) == 0
    out = capfd.readouterr().out
    assert "2 ranks, 3 tokens each, collective masked, FP8" in out
    assert "no DeepEP: it is not installed" in out


@pytest.mark.gpu
def test_between_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert ep.main(["--ranks", "2", "--tokens", "16"]) == 0
    assert "captured" in capfd.readouterr().out
