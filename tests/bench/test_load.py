"""The bench of loading, at sizes of a moment: it reads what it says."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench import load
from bench.records import read
from bench.serving.made_up_checkpoint import write_checkpoint
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.stored import INDEX, read_index
from tests.model.weights.test_dummy_checkpoint import INT4, config_folder


def test_a_made_up_checkpoint_is_one_to_others(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, INT4)
    write_checkpoint(folder, torch.device("cpu"))
    source = DummyCheckpoint(folder)
    weight_map = read_index(folder / INDEX)
    assert set(weight_map) == set(source.stored)
    for file in set(weight_map.values()):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                assert weight_map[name] == file
                assert opened.get_slice(name).get_shape() == [*source.stored[name].shape]


def test_a_load_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of two: fewer bytes than the files have, the same in all three ways."""
    folder, flags = tmp_path / "model", ["--small", "--layers", "3", "--weights", "fp8"]
    read_bytes: list[int] = []
    timed = load.timed
    monkeypatch.setattr(load, "timed", lambda call: timed(lambda: _noted(read_bytes, call())))
    arguments = [
        str(folder),
        *flags,
        "--ranks",
        "2",
        "--repeats",
        "1",
        "--record",
        "--results",
        str(tmp_path),
    ]
    assert load.main([*arguments, "--device", "cpu"]) == 0
    records = [*read(tmp_path / "load.jsonl")]
    assert [(record.case.split(", ")[-1], record.metric) for record in records] == [
        (state, metric)
        for state in ("cold", "warm")
        for metric in ("plain", "to the device", "loaded")
    ]
    assert all(record.value > 0 for record in records)
    assert {record.peer is None for record in records if record.metric != "plain"} == {False}
    assert len(set(read_bytes)) == 1
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.3 * stored < read_bytes[0] < 0.9 * stored


def _noted(numbers: list[int], number: int) -> int:
    numbers.append(number)
    return number
