"""Whole folders: what becomes int4, what stays to the bit, and what an interruption leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.quantize.__main__ import main
from model.quantize.journal import NAME as JOURNAL
from model.quantize.journal import Journal
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import dequantise_int4
from tests.tiny_checkpoint import make_tiny_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
}


def make(folder: Path, **options: Any) -> Path:
    return make_tiny_checkpoint(folder, **{"num_shards": 3, **SIZES, **options})


def run(model: Path, output: Path, *options: str) -> int:
    one = () if "--processes" in options else ("--processes", "1")
    folders = ("--model", str(model), "--output", str(output))
    return main([*folders, "--device", "cpu", *one, *options])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def is_routed(name: str) -> bool:
    return ".mlp.experts." in name


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_experts_become_int4_and_the_rest_stays(tmp_path: Path, fp8: bool, num_shards: int) -> None:
    model = make(tmp_path / "model", fp8=fp8, num_shards=num_shards, dtype=torch.bfloat16)
    (model / "notes.txt").write_text("kept")
    (model / "pytorch_model.bin").write_text("not kept")
    assert run(model, tmp_path / "out") == 0
    before, after = tensors_of(model), tensors_of(tmp_path / "out")
    with Checkpoint(model) as source:
        for name, weight in before.items():
            if not is_routed(name):
                assert torch.equal(after[name].view(torch.uint8), weight.view(torch.uint8)), name
            elif name.endswith("_proj.weight"):
                want = source.read(name, torch.float32)
                got = dequantise_int4(after[name], after[f"{name}_scale_inv"])
                assert (got - want).norm() < 0.12 * want.norm(), name
    # Three layers of experts (one of them the MTP layer's), four of them, with three matrices.
    num_layers = 1 + 1
    new = {name for name in after if is_routed(name)}
    assert len(new) == num_layers * 4 * 3 * 3
    stem = "model.layers.1.mlp.experts.2"
    assert after[f"{stem}.down_proj.weight"].shape == (128, 128)
    assert after[f"{stem}.down_proj.weight_scale_inv"].shape == (128, 2)
    assert [float(after[f"{stem}.w{i}.input_scale"]) for i in (1, 2, 3)] == [1.0] * 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in model.iterdir()
    } - {"pytorch_model.bin"}
    check_config_and_index(model, tmp_path / "out", fp8=fp8)


def check_config_and_index(model: Path, output: Path, *, fp8: bool) -> None:
    before = json.loads((model / "config.json").read_text())
    after = json.loads((output / "config.json").read_text())
    quantization = after.pop("quantization_config")
    before.pop("quantization_config", None)
    assert after == before
    assert quantization["quant_method"] == "w4afp8"
    left = quantization.get("modules_to_not_convert", [])
    assert ("model.layers.0.self_attn.o_proj" in left) != fp8
    assert not any(is_routed(name) for name in left)
    index = output / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        for path in output.glob("*.safetensors"):
            assert {name for name, file in weight_map.items() if file == path.name} == set(
                load_file(path)
            )
    with Checkpoint(output) as checkpoint:
        checkpoint.check(ModelConfig.from_folder(output))


def test_scales_in_files_of_their_own(tmp_path: Path) -> None:
    """A file of which nothing is left is not written."""
    model = make(tmp_path / "model", fp8=True, num_shards=1)
    tensors = tensors_of(model)
    (model / "model.safetensors").unlink()
    scales = {n: t for n, t in tensors.items() if is_routed(n) and n.endswith("_scale_inv")}
    rest = {n: t for n, t in tensors.items() if n not in scales}
    save_file(rest, model / "a.safetensors")
    save_file(scales, model / "b.safetensors")
    weight_map = dict.fromkeys(rest, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert run(model, tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["a.safetensors"]
    with Checkpoint(tmp_path / "out") as checkpoint:
        checkpoint.check(ModelConfig.from_folder(tmp_path / "out"))


def program(model: Path, output: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "model.quantize", "--resume"]
    command += ["--model", str(model), "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_anywhere_and_carried_on(tmp_path: Path) -> None:
    model = make(tmp_path / "model", num_shards=4, n_routed_experts=8)
    assert run(model, tmp_path / "whole") == 0
    output = tmp_path / "out"
    output.mkdir()
    for num_lines in (2, 4):  # in the first file, in a later one
        for attempt in range(20):
            before = shutil.copytree(output, tmp_path / f"before-{num_lines}-{attempt}")
            child = program(model, output)
            assert child.stdout is not None
            for _ in range(num_lines):
                child.stdout.readline()
            child.kill()
            status = child.wait()
            child.stdout.close()
            if not (output / "config.json").exists():
                break
            shutil.rmtree(output)  # it was done before the signal came
            before.rename(output)
        assert status == -signal.SIGKILL
        assert not (output / "config.json").exists()
    assert run(model, output, "--resume") == 0
    assert files_of(output) == files_of(tmp_path / "whole")


def test_what_is_damaged_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = make(tmp_path / "model"), tmp_path / "out"
    names = sorted(path.name for path in model.glob("*.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr("model.quantize.__main__._copy_others", no_space)
        assert run(model, output) == 1
    assert "No space left" in capsys.readouterr().out
    # Behind the last file: one is damaged, one gone, one half-written beside the journal's cut end.
    with (output / names[0]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    (output / names[1]).rename(output / f"{names[1]}.partial")
    with (output / JOURNAL).open("a") as journal:
        journal.write('{"shard": "mod')
    assert run(model, output, "--resume") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["shard"] for event in events if event["event"] == "kept"] == names[2:]
    assert [event["shard"] for event in events if event["event"] == "shard"] == names[:2]
    assert not (output / f"{names[1]}.partial").exists()
    assert run(model, tmp_path / "whole") == 0
    assert files_of(output) == files_of(tmp_path / "whole")
    assert run(model, output, "--resume") == 0  # there is nothing left to do


def test_not_carried_on_from_another_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = make(tmp_path / "model"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("model.quantize.__main__._copy_others", no_space)
        assert run(model, output) == 1
    make(model, seed=1)
    assert run(model, output, "--resume") == 2
    assert "was begun from another checkpoint" in capsys.readouterr().out
    assert run(model, output) == 2
    assert "--resume carries on" in capsys.readouterr().out


def test_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = make(tmp_path / "model"), tmp_path / "out"
    output.mkdir()
    with Journal(output, "whatever"):
        assert run(model, output, "--resume") == 2
    assert "another process works in" in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == [JOURNAL]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64; w4afp8 has scales for groups of 128"),
        ({"moe_intermediate_size": 192}, "moe_intermediate_size is 192"),
        ({"first_k_dense_replace": 2, "num_nextn_predict_layers": 0}, "has no routed experts"),
    ],
)
def test_models_that_the_format_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    model = make(tmp_path / "model", **change)
    assert run(model, tmp_path / "out") == 1
    assert message in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_broken_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(tmp_path / "model")
    quantised = tmp_path / "quantised"
    assert run(model, quantised) == 0
    assert run(quantised, tmp_path / "again") == 1
    assert "is int4 already" in capsys.readouterr().out
    shard = sorted(model.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert run(model, tmp_path / "out") == 1
    assert "is cut short" in capsys.readouterr().out
    shard.write_bytes(content)
    spoil_expert(model)
    assert run(model, tmp_path / "out") == 1
    assert "experts.3.up_proj.weight: some weights are not finite" in capsys.readouterr().out


def spoil_expert(model: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][5, 5] = float("nan")
            save_file(tensors, path, metadata={"format": "pt"})


def test_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    for source, output, message in (
        (tmp_path / "none", tmp_path / "out", "none is no folder"),
        (tmp_path / "full", tmp_path / "out", "has no config.json"),
        (model, model, "have to be two folders"),
        (model, model / "inside", "have to be two folders"),
        (model, tmp_path / "full", "full is not empty"),
        (model, tmp_path / "full" / "precious", "precious is no folder"),
    ):
        assert run(source, output, "--resume") == 2, output
        assert message in capsys.readouterr().out


def test_more_than_fits_on_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    assert run(make(tmp_path / "model"), tmp_path / "out") == 1
    assert "are free" in capsys.readouterr().out


def test_int4_where_others_of_the_layer_are_not(tmp_path: Path) -> None:
    """Found when the experts are read, not computed with."""
    model = make(tmp_path / "model", num_shards=1, num_nextn_predict_layers=0)
    output = tmp_path / "out"
    assert run(model, output) == 0
    original, tensors = tensors_of(model), tensors_of(output)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = original[name]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, output / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is not int4, unlike others"):
        DeepseekV3.load(output, device="cpu", dtype=torch.float32)
