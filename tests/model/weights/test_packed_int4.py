"""Int4 checkpoints of others: unpacked as their own packers packed them, and computed right."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from model.batch import AttentionForm
from model.w4afp8 import GROUP
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import pack_nibbles
from tests.model.driver import PagedRunner, load_all
from tests.model.reference import load_reference, reference_logits
from tests.model.weights.packed_folder import QUANTIZATION, make_packed, pack, save
from tests.tiny_checkpoint import make_tiny_checkpoint

OTHERS = load_file(Path(__file__).with_name("packed_by_others.safetensors"))
METHODS = ("awq", "gptq", "compressed-tensors")
ATTENTION, EXPERT = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts.0.up_proj"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "v_head_dim": 32,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "initializer_range": 0.05,
}
# Of logits, relative by norm: what FP8 activations of the experts do.
FP8_ERROR = 0.03


def packed_by_others(method: str, kind: str) -> dict[str, torch.Tensor]:
    prefix = f"{method}.{kind}."
    return {name.removeprefix(prefix): v for name, v in OTHERS.items() if name.startswith(prefix)}


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("method", METHODS)
def test_reads_what_their_packers_write(tmp_path: Path, method: str, kind: str) -> None:
    packed = packed_by_others(method, kind)
    tensors = {f"{stem}.{end}": v for end, v in packed.items() for stem in (ATTENTION, EXPERT)}
    folder = save(tmp_path / "model", tensors, {"quantization_config": QUANTIZATION[method]})
    values, scales, zeros = OTHERS["values"].float(), OTHERS["scales"], OTHERS[f"zeros.{kind}"]
    spread = zeros.float().repeat_interleave(GROUP, 1), scales.float().repeat_interleave(GROUP, 1)
    with Checkpoint(folder) as checkpoint:
        got = checkpoint.read(f"{ATTENTION}.weight", torch.float32)
        assert torch.equal(got, (values - spread[0]) * spread[1])
        if kind == "asymmetric":
            with pytest.raises(CheckpointError, match=rf"{EXPERT}.weight is int4 with zero points"):
                checkpoint.read_int4(f"{EXPERT}.weight")
            return
        nibbles, stored_scales = checkpoint.read_int4(f"{EXPERT}.weight")
        assert torch.equal(nibbles, pack_nibbles(values - 8))
        assert torch.equal(stored_scales, scales)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("method", METHODS)
def test_the_folders_of_these_tests_are_packed_alike(method: str, kind: str) -> None:
    want = packed_by_others(method, kind)
    got = pack(method, OTHERS["values"], OTHERS[f"zeros.{kind}"], OTHERS["scales"])
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("int4"), **SIZES)


@pytest.mark.parametrize("method", QUANTIZATION)
def test_computes_what_it_says(plain: Path, tmp_path: Path, method: str) -> None:
    """To the bit what a w4afp8 folder of the same values gives, and what transformers computes with
    dequantised weights but for the activations, which experts take in FP8. Matrices that are no
    experts' are asymmetric here."""
    folder, native, twin = make_packed(plain, tmp_path, method, zero=7)
    ids = list(range(4, 60))
    got, same = (
        PagedRunner(load_all(one)).forward({0: ids}, AttentionForm.PLAIN, all_rows=True)
        for one in (folder, native)
    )
    assert torch.equal(got, same)
    want = reference_logits(load_reference(twin), ids)
    assert (got - want).norm() < FP8_ERROR * want.norm()


def test_asymmetric_experts_are_refused_before_any_weight_is_loaded(
    plain: Path, tmp_path: Path
) -> None:
    for method in QUANTIZATION:
        folder, _, _ = make_packed(plain, tmp_path / method, method, expert_zero=7)
        with pytest.raises(CheckpointError, match="zero points.*symmetric checkpoint, or have ctl"):
            load_all(folder)


def test_act_order_is_refused(plain: Path, tmp_path: Path) -> None:
    folder, _, _ = make_packed(plain, tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.gate_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight is int4 with columns out of order"
    ):
        load_all(folder)


def test_other_groups_and_types_are_named(plain: Path, tmp_path: Path) -> None:
    folder, _, _ = make_packed(plain, tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.1.mlp.experts.0.gate_proj"
    scales, values = tensors[f"{stem}.scales"].repeat(2, 1), tensors[f"{stem}.qweight"].long()
    for end, value, message in (
        ("scales", scales, rf"{stem}.weight_scale_inv is \[128, 4\]"),
        ("qweight", values, f"unexpected: {stem}.qweight"),
        ("qzeros", tensors[f"{stem}.qzeros"][:1], rf"{stem}.weight_zero_point is \[128, 1\]"),
    ):
        save_file(tensors | {f"{stem}.{end}": value}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_all(folder)
