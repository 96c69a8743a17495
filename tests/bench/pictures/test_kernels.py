"""The picture of a grouped product: what is drawn from which records."""

from pathlib import Path

import pytest

from bench.kernel_cases.w4a8_floor import W4a8Shape
from bench.pictures.kernels import BYTES_PER_SECOND, curves, draw
from bench.records import RESULTS, read
from loadgen.records import BenchRun

RUN = BenchRun(
    date="2026-01-01T00:00:00+00:00", commit="abc", gpu="1 x NVIDIA H200",
    bench="w4a8_grouped_gemm",
)  # fmt: skip


def test_curves_join_the_peers_of_a_case() -> None:
    case = "masked e32 m16 n4096 k7168"
    records = [
        RUN.record("copy by a kernel", "rate", "GB/s", 4000.0),
        RUN.record(case, "time", "us", 120.0, peer="DeepGEMM FP8 masked", peer_value=240.0),
        RUN.record(case, "time", "us", 120.0, peer="floor", peer_value=119.0),
        RUN.record(
            case, "sustained time", "us", 130.0, peer="DeepGEMM FP8 masked", peer_value=260.0
        ),
        RUN.record("masked e32 m1 n4096 k7168", "time", "us", 110.0),
        RUN.record("masked e32 m16 n4096 k7168 row scales", "time", "us", 115.0),
        RUN.record("masked e32 m16 n4096 k7168 with -8", "time", "us", 130.0),
        RUN.record("masked e32 m16 n4096 k7168 static scale", "time", "us", 114.0),
        RUN.record("gated e32 m16 n4096 k7168", "time", "us", 118.0),
        RUN.record("contiguous e8 m4096 n4096 k7168", "time", "us", 2700.0),
    ]
    (curve,) = curves(records)
    assert (curve.ours, curve.peer) == ({16: 120.0, 1: 110.0}, {16: 240.0})
    assert curve.by_row == {16: 115.0}
    shape = W4a8Shape(num_experts=32, n=4096, k=7168)
    assert curve.shape == shape
    assert curve.floor == {each: shape.floor_microseconds(each, 4e12) for each in (1, 16)}


def test_floor() -> None:
    shape = W4a8Shape(num_experts=32, n=4096, k=7168)
    # Half a byte a weight and a scale for 128 of them; then the matrix instructions.
    weights = 32 * 4096 * 7168
    assert shape.floor_microseconds(0, 4e12) == pytest.approx(weights * (0.5 + 2 / 128) / 4e6)
    assert shape.floor_microseconds(4096, 4e12) == pytest.approx(2 * weights * 4096 / 1979e6)


def test_recorded_results_can_be_drawn(tmp_path: Path) -> None:
    found = curves(read(RESULTS / "w4a8_grouped_gemm.jsonl"))
    assert {(each.shape.n, each.shape.k) for each in found} == {(4096, 7168), (7168, 2048)}
    assert BYTES_PER_SECOND > 1e12
    draw(found, tmp_path / "picture.png", "a test")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_no_record_is_said() -> None:
    with pytest.raises(ValueError, match="masked e32"):
        curves([RUN.record("copy", "rate", "GB/s", 4000.0)])
