"""Folders that do not fit are refused by the names of the tensors; FP8 is read as defined."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import EMPTY, Placement
from model.batch import AttentionForm
from model.config import ModelConfig
from model.weights.checkpoint import Checkpoint
from tests.model.driver import PagedRunner, load_all
from tests.model.reference import assert_close, load_reference, reference_logits
from tests.tiny_checkpoint import make_tiny_checkpoint

Tensors = dict[str, torch.Tensor]
SMALL = {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def make_small(folder: Path, **options: object) -> Path:
    return make_tiny_checkpoint(folder, num_experts_per_tok=2, **{**SMALL, **options})


def edit(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Rewrites a folder of one file with its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def remove(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


PROBLEMS = {
    "missing norm": (remove(NORM), f"1 missing: {NORM}"),
    "missing expert": (remove(EXPERT), f"1 missing: {EXPERT}"),
    "extra": (put("model.layers.0.odd.weight", torch.ones(1)), "unexpected: model.layers.0.odd"),
    "layer too many": (
        put("model.layers.2.mlp.gate.weight", torch.ones(4, 64)),
        r"unexpected: model.layers.2.mlp.gate.weight",
    ),
    "expert too many": (
        put("model.layers.1.mlp.experts.4.up_proj.weight", torch.ones(32, 64)),
        r"unexpected: model.layers.1.mlp.experts.4.up_proj.weight",
    ),
    "misshapen": (put(EXPERT, torch.ones(32, 63)), rf"{EXPERT} is \[32, 63\], not \[32, 64\]"),
    "transposed": (put(EXPERT, torch.ones(64, 32)), rf"{EXPERT} is \[64, 32\]"),
    "integers": (put(NORM, torch.ones(64, dtype=torch.int32)), f"{NORM} has dtype I32"),
    "fp8 without scale": (
        put(EXPERT, torch.ones(32, 64).to(torch.float8_e4m3fn)),
        f"FP8 without {EXPERT}_scale_inv",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problem_is_named(tmp_path: Path, problem: str) -> None:
    change, message = PROBLEMS[problem]
    folder = make_small(tmp_path)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_all(folder)


def test_misshapen_scale_is_named(tmp_path: Path) -> None:
    folder = make_small(tmp_path, fp8=True)
    edit(folder, put(f"{EXPERT}_scale_inv", torch.ones(2, 1)))
    with pytest.raises(CheckpointError, match=rf"{EXPERT}_scale_inv is F32 \[2, 1\]"):
        load_all(folder)


def test_all_problems_at_once_but_not_all_names(tmp_path: Path) -> None:
    folder = make_small(tmp_path)

    def spoil(tensors: Tensors) -> None:
        for expert in range(4):
            tensors.pop(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
            tensors.pop(f"model.layers.1.mlp.experts.{expert}.down_proj.weight")
        tensors["extra"] = torch.ones(1)
        tensors[NORM] = torch.ones(65)

    edit(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        load_all(folder)
    assert "8 missing" in str(caught.value)
    assert "and 3 more" in str(caught.value)
    assert "1 unexpected: extra" in str(caught.value)
    assert f"1 wrong: {NORM} is [65]" in str(caught.value)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    file = make_small(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for content in (
        whole[:-1],
        whole[:100],
        whole[:3],
        b"",
        b"\xff" * 64,
        b"\x02" + bytes(7) + b"[]",
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is"):
            Checkpoint(tmp_path)


def test_broken_index(tmp_path: Path) -> None:
    folder = make_small(tmp_path, num_shards=3)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    file = fields["weight_map"][NORM]
    for weight_map, message in (
        (fields["weight_map"] | {"absent": file}, "absent, which its file lacks"),
        (fields["weight_map"] | {NORM: "../" + file}, "file name"),
        (fields["weight_map"] | {NORM: 5}, "file name"),
        ([], "file name"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder)
    index.write_text(json.dumps(fields))
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        Checkpoint(folder)


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    one = load_all(make_small(tmp_path / "one"))
    folder = make_small(tmp_path / "three", num_shards=3)
    # A file that the index does not name is no part of the checkpoint.
    save_file({"stray": torch.ones(1)}, folder / "model-00004-of-00004.safetensors")
    assert torch.equal(one.head.weight, load_all(folder).head.weight)
    expected, read = (model.moe_layers[0].experts for model in (one, load_all(folder)))
    assert torch.equal(expected.down, read.down)


def test_only_held_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_small(tmp_path)
    read: list[str] = []
    original = Checkpoint.read

    def spy(self: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
        read.append(name)
        return original(self, name, dtype)

    monkeypatch.setattr(Checkpoint, "read", spy)
    num_layers = ModelConfig.from_folder(folder).num_moe_layers
    placement = Placement(
        num_ranks=2,
        slots_per_rank=4,
        num_logical=4,
        physical_to_logical=((1, 3, EMPTY, EMPTY, 2, 0, EMPTY, 2),) * num_layers,
    )
    load_all(folder, experts=ExpertShard.build(placement, 1, LocalDispatcher(4), "cpu"))
    experts = sorted(name.split(".")[5] for name in read if ".experts." in name)
    assert experts == sorted([*"000222"] * num_layers)  # three matrices each, a replica once


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (0, 4)])
def test_experts_of_another_model(tmp_path: Path, shape: tuple[int, int]) -> None:
    folder = make_small(tmp_path)
    with pytest.raises(ValueError, match="the model has 1 of 4"):
        load_all(folder, experts=ExpertShard.alone(*shape))


def dequantised(tensors: Tensors) -> Tensors:
    """Block by block, as the format is defined."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = value.float()
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    plain[name][128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j]
    return plain


def test_fp8_equals_its_dequantised_twin(tmp_path: Path) -> None:
    """Sizes that cut blocks at both edges, judged by transformers on the dequantised weights."""
    sizes = {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 130}
    folder = make_small(tmp_path / "fp8", fp8=True, initializer_range=0.08, **sizes)
    stored = load_file(folder / "model.safetensors")
    assert stored[EXPERT].dtype == torch.float8_e4m3fn
    assert stored[f"{EXPERT}_scale_inv"].shape == (2, 2)
    twin = make_small(tmp_path / "twin", **sizes)
    save_file(dequantised(stored), twin / "model.safetensors")
    model = load_all(folder)
    ids = list(range(4, 40))
    got = PagedRunner(model).forward({0: ids}, AttentionForm.PLAIN, all_rows=True)
    assert_close(got, reference_logits(load_reference(twin), ids), "FP8")


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """E8M0: one byte, the exponent; read as exactly what it stands for."""
    folder = make_small(tmp_path / "fp8", fp8=True, initializer_range=0.08)
    tensors = load_file(folder / "model.safetensors")
    rounded = {}
    for name, value in tensors.items():
        is_scale = name.endswith("_scale_inv")
        rounded[name] = value.log2().round().exp2() if is_scale else value
        tensors[name] = rounded[name].to(torch.float8_e8m0fnu) if is_scale else value
    save_file(tensors, folder / "model.safetensors")
    twin = make_small(tmp_path / "twin")
    save_file(dequantised(rounded), twin / "model.safetensors")
    ids = list(range(4, 40))
    got, want = (
        PagedRunner(load_all(one)).forward({0: ids}, AttentionForm.PLAIN, all_rows=True)
        for one in (folder, twin)
    )
    assert torch.equal(got, want)
    name = "model.layers.0.self_attn.o_proj.weight"
    with Checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read_fp8(name)[1], rounded[f"{name}_scale_inv"])


def test_mtp_layers_that_config_json_does_not_count(tmp_path: Path) -> None:
    folder = make_small(tmp_path, num_nextn_predict_layers=2)
    config = json.loads((folder / "config.json").read_text())
    ids = list(range(4, 20))
    want = PagedRunner(load_all(folder)).forward({0: ids}, AttentionForm.PLAIN)
    for number in (None, 0):
        written = config | {"num_nextn_predict_layers": number}
        (folder / "config.json").write_text(json.dumps(written))
        got = PagedRunner(load_all(folder)).forward({0: ids}, AttentionForm.PLAIN)
        assert torch.equal(got, want)
        load_all(folder, config=replace(ModelConfig.from_folder(folder), mtp="whole"))


def test_scales_of_a_cache_in_fp8_are_left_alone(tmp_path: Path) -> None:
    folder = make_small(tmp_path)
    want = load_all(folder).head.weight
    for name in ("k_scale", "v_scale", "attn.k_scale", "kv_scale"):
        edit(folder, put(f"model.layers.0.self_attn.{name}", torch.ones(1)))
    assert torch.equal(load_all(folder).head.weight, want)


def test_bfloat16_checkpoint(tmp_path: Path) -> None:
    """Stored in BF16, computed in float32 and in BF16."""
    folder = make_small(tmp_path, dtype=torch.bfloat16)
    ids = list(range(4, 40))
    want = reference_logits(load_reference(folder), ids)
    runner = PagedRunner(load_all(folder))
    assert_close(runner.forward({0: ids}, AttentionForm.PLAIN, all_rows=True), want, "float32")
    for form in AttentionForm:
        runner = PagedRunner(load_all(folder, dtype=torch.bfloat16))
        got = runner.forward({0: ids}, form, all_rows=True)
        assert got.dtype == torch.float32
        error = (got - want).abs().mean() / want.abs().mean()
        assert error < 0.05, (form, error)
