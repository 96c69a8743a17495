"""The picture of what drafts gain: ratios of the newest records."""

from pathlib import Path

import pytest

from bench.pictures.drafts import draw, gains
from loadgen.records import BenchRun, Record

RUN = BenchRun(date="", commit="", gpu="", bench="decode_rank")
WITHOUT = "fp8, 61 layers, context 2048, batch 8"
WITH = "fp8, 61 layers, context 2048, 1 drafts, 1.84 tokens a step, batch 8"


def records() -> list[Record]:
    """800 and 1,200 tokens a second; cases of other layers, and of drafts alone, do not count."""
    return [
        RUN.record(WITHOUT, "step", "ms", 10.0),
        RUN.record(WITH, "step", "ms", 12.3),
        RUN.record(WITH, "tokens a second", "1/s", 1200.0),
        RUN.record(WITH.replace("61", "12"), "tokens a second", "1/s", 1.0),
        RUN.record(WITH.replace("batch 8", "batch 16"), "tokens a second", "1/s", 1.0),
    ]


def test_a_gain_is_the_ratio_to_no_drafts(tmp_path: Path) -> None:
    found = gains(records())
    assert found == {"fp8": {1: {8: 1.5}}}
    draw(found, tmp_path / "images" / "drafts.png")
    assert (tmp_path / "images" / "drafts.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_pair_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="its twin without"):
        gains(records()[1:])
