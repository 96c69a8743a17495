"""The gateway's benchmark: its arithmetic, and a short run of the whole thing."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gateway_load import LETTERS, lags_of
from bench.records import read
from bench.serving.raw_streams import RawStream
from tests.certificates import needs_openssl
from tests.free_ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("letter", LETTERS)
def test_lags_are_found_from_arrivals(letter: str) -> None:
    rng = random.Random(letter)
    shift = LETTERS.index(letter) / len(LETTERS) * 0.05
    lags = [0.01 + rng.choice([0, 0.02, 0.3]) * rng.random() for _ in range(200)]
    lags[17] = 0.011
    ticks = [1234 * 0.05 + shift + number * 0.05 for number in range(200)]
    times = [ticks[0] - 0.03, *(tick + lag for tick, lag in zip(ticks, lags, strict=True))]
    assert lags_of(letter * 201, times, 20) == pytest.approx(lags)


async def test_output_is_found_where_it_arrived() -> None:
    stream = RawStream("/x", {})
    text = b'data: {"delta":{"role":"assistant","content":""}}\n\ndata: {"delta":{"content":"ab"}}'
    for part in (text[:70], text[70:], b'\n\ndata: {"delta":{"content":"c"}}\n\ndata: [DONE]\n\n'):
        stream.data_received(part)
        await asyncio.sleep(0.01)
    output, times = stream.arrivals()
    assert output == "abc"
    assert times[0] == times[1] < times[2]
    assert stream.is_complete


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=needs_openssl)])
def test_a_short_run(tmp_path: Path, tls: bool) -> None:
    port = free_port()
    options = ["--tls", str(tmp_path)] if tls else []
    result = subprocess.run(
        [sys.executable, "-m", "bench.gateway_load", "--results", str(tmp_path), "--streams", "20",
         "--seconds", "1", "--ramp-seconds", "0.5", "--request-rate", "10",
         "--warm-up-requests", "25", "--port", str(port), "--record", *options],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    records = list(read(tmp_path / "gateway.jsonl"))
    assert all(record.case.endswith("mutual TLS") == tls for record in records)
    values = {record.metric: record.value for record in records}
    assert values["streams_held"] == 20
    assert 0 < values["delivered"] < 1.5  # a busy machine lags behind
    assert values["added_ttft_p50"] > 0
