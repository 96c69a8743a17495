"""The bench of `ctl quantize`, with experts that take no time."""

from pathlib import Path

import pytest

from bench import quantize
from bench.ranks.deepseek_v3_config import SMALL
from loadgen.records import BenchRun
from model.config import ModelConfig
from model.weights.checkpoint import Checkpoint

SIZES = {name: SMALL[name] for name in SMALL if "experts" not in name and "replace" not in name}


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "FILE_BYTES", 500_000)
    model = quantize.write_checkpoint(tmp_path / "fp8", 2, 8, **SIZES)
    assert len([*model.glob("*.safetensors")]) > 2
    with Checkpoint(model) as checkpoint:
        checkpoint.check(ModelConfig.from_folder(model))
    run = BenchRun(date="", commit="", gpu="", bench="quantize")
    source, processor = quantize.measure(run, model, "cpu", 1)
    assert source.case == processor.case == "FP8 experts to int4 on cpu, 1 process"
    assert (source.unit, processor.unit) == ("GB/min", "s/GB")
    assert min(source.value, processor.value, source.peer_value or 0) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
