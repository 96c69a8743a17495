"""What a start says while it goes on, a line at the begin of each phase and one at its end, and
what is left of it as a metric."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from engine.link.messages import Ready
from engine.process.rank_start import RankStart
from engine.server.worker_metrics import WorkerMetrics
from engine.start import model_loading, start_clock
from engine.start import rank as engine_rank
from engine.start.model_loading import REPORT_SECONDS, LoadProgress
from engine.start.rank import build_context
from engine.start.start_clock import StartClock
from engine.step import graph_capture
from engine.step.graph_capture import GIB, RepeatedCall, capture_sizes
from tests.model.weights.test_dummy_checkpoint import FP8, config_folder

PHASES = (
    "group", "plan", "dispatchers", "load", "compile", "memory", "warm_up", "graphs", "transfer",
    "peers",
)  # fmt: skip
BEGINS, OVER = "start phase begins", "start phase over"
Lines = list[Any]
Turn = Callable[[float], None]


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    """Lets seconds pass in all that tells how long a start takes; otherwise none do."""
    now = [100.0]
    real = start_clock.time
    fake = SimpleNamespace(
        monotonic=lambda: now[0],
        clock_gettime=real.clock_gettime,
        CLOCK_BOOTTIME=real.CLOCK_BOOTTIME,
    )
    for module in (start_clock, model_loading, graph_capture):
        monkeypatch.setattr(module, "time", fake)

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def phase_lines(lines: Lines) -> list[tuple[str, str]]:
    return [(line["event"], line["phase"]) for line in lines if "phase" in line]


def test_a_phase_has_a_line_when_it_begins_and_one_when_it_is_over(turn: Turn) -> None:
    with capture_logs() as lines:
        clock = StartClock()
        turn(0.25)  # belongs to the phase that comes next: nothing of a start is left out
        with clock.phase("load"):
            assert phase_lines(lines) == [(BEGINS, "load")], "it has not said so in time"
            turn(2.5)
        with clock.phase("graphs"):
            turn(1.0)
    assert [line["log_level"] for line in lines] == ["info"] * 4
    assert phase_lines(lines) == [
        (BEGINS, "load"), (OVER, "load"), (BEGINS, "graphs"), (OVER, "graphs")
    ]  # fmt: skip
    assert [line["seconds"] for line in lines if line["event"] == OVER] == [2.75, 1.0]
    (python, age), *others = clock.seconds()
    assert python == "python"
    assert age > 0, "this process has begun some time ago"
    assert others == [("load", 2.75), ("graphs", 1.0)]


def test_a_phase_that_fails_is_not_over(turn: Turn) -> None:
    clock = StartClock()
    with capture_logs() as lines, pytest.raises(OSError, match="gone"), clock.phase("load"):
        raise OSError("gone")
    assert phase_lines(lines) == [(BEGINS, "load")]
    assert [phase for phase, _ in clock.seconds()] == ["python"]


def test_all_phases_of_a_rank_are_told_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole start on a CPU, but for the process."""
    torch.set_num_threads(1)
    monkeypatch.setattr(engine_rank, "configure", lambda **_: None)  # of this process's own log
    settings = {
        "model": str(config_folder(tmp_path / "model", FP8)), "load_format": "dummy",
        "kv_pages": 8, "page_tokens": 16, "max_model_len": 64,
    }  # fmt: skip
    start = RankStart(
        role="decode", epoch="e", local_rank=0, rank=0, size=1, rendezvous="", group_secret="",
        endpoint="", front_pid=os.getpid(), settings=settings,
    )  # fmt: skip
    link: Any = None
    with capture_logs() as lines:
        context = build_context(start, link)
    ready = context.ready
    context.close()
    assert phase_lines(lines) == [(event, phase) for phase in PHASES for event in (BEGINS, OVER)]

    # All layers are loaded between the begin of that phase and its end.
    begin, loaded, end = (
        next(number for number, line in enumerate(lines) if asked.items() <= line.items())
        for asked in (
            {"event": BEGINS, "phase": "load"},
            {"event": "weights loaded", "layers": "4/4", "rank": 0},
            {"event": OVER, "phase": "load"},
        )
    )
    assert begin < loaded < end

    samples, text = start_seconds_of(ready)
    assert set(samples) == {"python", *PHASES}
    assert all(seconds > 0 for seconds in samples.values())
    for line in lines:
        if line["event"] == OVER:
            assert samples[line["phase"]] == pytest.approx(line["seconds"], abs=0.006)
    assert [phase for phase in samples if phase not in text] == [], "nobody says what they are"


def start_seconds_of(ready: Ready) -> tuple[dict[str, float], str]:
    """Of the metric: seconds by phase, and its description."""
    registry = CollectorRegistry()
    WorkerMetrics(registry, "decode", tuple, lambda: [ready])
    (family,) = (each for each in registry.collect() if each.name == "epserve_start_seconds")
    assert all(sample.labels["rank"] == "0" for sample in family.samples)
    return {s.labels["phase"]: s.value for s in family.samples}, family.documentation


def test_loading_says_now_and_then_how_far_it_is(turn: Turn) -> None:
    source: Any = SimpleNamespace(bytes_read=0, bytes_planned=250 * 10**9)
    with capture_logs() as lines:
        progress = LoadProgress(source, rank=3, num_layers=61)
        for layer in range(61):
            turn(0.5)
            source.bytes_read += 4 * 10**9
            progress.layer(layer)
    assert {line["event"] for line in lines} == {"weights loaded"}
    assert {line["rank"] for line in lines} == {3}
    assert [line["layers"] for line in lines] == [
        "10/61", "20/61", "30/61", "40/61", "50/61", "60/61", "61/61"
    ]  # fmt: skip
    for before, after in pairwise(lines[:-1]):
        assert after["seconds"] - before["seconds"] == REPORT_SECONDS
    assert [line["seconds_left"] for line in lines] == [26, 21, 16, 11, 6, 1, 1]
    last = lines[-1]
    assert (last["gigabytes"], last["seconds"], last["gigabytes_per_second"]) == (244.0, 30.5, 8.0)


class Growing(RepeatedCall):
    """Holds half a GiB for the largest size and a quarter for each other."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def num_bytes(self) -> int:
        return sum(GIB // 2 if size > 4 else GIB // 4 for size in self.recorded)


def test_each_recorded_size_has_a_line(turn: Turn) -> None:
    capture = Growing()

    def record(size: int) -> None:
        turn(size)
        capture.recorded.append(size)

    with capture_logs() as lines:
        capture_sizes("decode step", (1, 4, 8), record, capture)
    told = [(line["tokens"], line["done"], line["seconds"], line["gib"]) for line in lines]
    assert {line["event"] for line in lines} == {"decode step recorded"}
    assert told == [(8, "1/3", 8.0, 0.5), (4, "2/3", 12.0, 0.75), (1, "3/3", 13.0, 1.0)]
