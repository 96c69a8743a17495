"""Int4 experts in the model: what they compute, in which slot they lie, and moved between slots."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from engine.experts.rank_experts import CheckpointExperts
from engine.process.fingerprint import kv_fingerprint
from ep.placement.expert_slots import ExpertSlots
from ep.placement.placement import EMPTY
from model.batch import AttentionForm
from model.config import ModelConfig
from model.moe.experts import load_experts
from model.moe.int4_experts import Int4Experts
from model.quantize.__main__ import main
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import dequantise_int4
from model.weights.weights import Weights
from tests.model.driver import PagedRunner, load_all
from tests.tiny_checkpoint import make_tiny_checkpoint

LAYER = "model.layers.1.mlp"
NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and the same with int4 experts."""
    root = tmp_path_factory.mktemp("w4a8")
    model = make_tiny_checkpoint(
        root / "model", hidden_size=256, moe_intermediate_size=128, initializer_range=0.05
    )
    folders = ["--model", str(model), "--output", str(root / "w4afp8")]
    assert main([*folders, "--device", "cpu", "--processes", "1"]) == 0
    return model, root / "w4afp8"


def load_layer(folder: Path, experts: Sequence[int], device: str = "cpu") -> Int4Experts:
    config = ModelConfig.from_folder(folder)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        weights = Weights(checkpoint=checkpoint, device=torch.device(device), dtype=torch.float32)
        loaded = load_experts(weights, config, LAYER, experts)
    assert isinstance(loaded, Int4Experts)
    return loaded


def matrices(folder: Path, expert: int) -> list[torch.Tensor]:
    """gate, up and down in float32, by the format's definition."""
    tensors = load_file(folder / "model.safetensors")
    stem = f"{LAYER}.experts.{expert}"
    return [
        dequantise_int4(
            tensors[f"{stem}.{name}_proj.weight"], tensors[f"{stem}.{name}_proj.weight_scale_inv"]
        )
        for name in ("gate", "up", "down")
    ]


def in_fp8(rows: torch.Tensor, scale: float | None) -> torch.Tensor:
    """What is left of activations; one scale, or as each 128 of a row want it."""
    if scale is not None:
        return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    groups = rows.unflatten(-1, (-1, 128))
    scales = groups.abs().amax(dim=-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def want(
    folder: Path,
    rows: torch.Tensor,
    expert: int,
    scales: tuple[float | None, float | None] = (None, None),
) -> torch.Tensor:
    gate, up, down = matrices(folder, expert)
    rows = in_fp8(rows, scales[0])
    inner = F.silu((rows @ gate.T).bfloat16().float()) * (rows @ up.T).bfloat16().float()
    return in_fp8(inner, scales[1]) @ down.T


def unrounded(folder: Path, rows: torch.Tensor, expert: int) -> torch.Tensor:
    """`want` of activations that are not quantised."""
    gate, up, down = matrices(folder, expert)
    return (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def with_config(folder: Path, target: Path, **quantization: object) -> Path:
    """A copy with other fields of quantization_config."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (target / path.name).write_bytes(path.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] |= quantization
    (target / "config.json").write_text(json.dumps(fields))
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_what_the_checkpoint_says(folders: tuple[Path, Path], dtype: torch.dtype) -> None:
    slots = (5, EMPTY, 0, 7, 0)
    counts = (3, 0, 40, 0, 1)
    experts = load_layer(folders[1], slots)
    torch.manual_seed(4)
    rows = torch.randn(sum(counts), 256).to(dtype)
    got = experts.forward(rows, [*counts, 0])
    assert got.dtype == dtype
    parts = rows.float().split(counts)
    wanted = torch.cat(
        [want(folders[1], part, max(slot, 0)) for part, slot in zip(parts, slots, strict=True)]
    )
    assert (got.float() - wanted).norm() < 5e-3 * wanted.norm()
    assert experts.forward(rows[:0], [0] * 5).shape == (0, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_a_gpu_computes_the_same(folders: tuple[Path, Path], tmp_path: Path, static: bool) -> None:
    folder = folders[1]
    if static:
        folder = with_config(folder, tmp_path / "static", moe_activation_scheme="static")
    slots, counts = (5, EMPTY, 0, 7), (3, 0, 40, 300)
    torch.manual_seed(7)
    rows = torch.randn(sum(counts), 256).bfloat16()
    wanted = load_layer(folder, slots).forward(rows, counts).float()
    experts = load_layer(folder, slots, "cuda")
    got = experts.forward(rows.cuda(), counts).float().cpu()
    # Between the products activations are rounded by up to 1/16. Where they differ by as much as
    # the products may, 2e-3, one of 30 lies on the other side of an edge: some 1.1e-2 of all.
    # Either side is as far from what was rounded.
    assert (got - wanted).norm() < 1.5e-2 * wanted.norm()
    exact = torch.cat(
        [
            unrounded(folder, part.float(), max(slot, 0))
            for part, slot in zip(rows.split(counts), slots, strict=True)
        ]
    )
    assert (got - exact).norm() < 1.02 * (wanted - exact).norm()
    assert experts.forward(rows[:0].cuda(), [0] * 4).shape == (0, 256)


def test_a_row_does_not_depend_on_the_others(folders: tuple[Path, Path]) -> None:
    experts = load_layer(folders[1], range(NUM_EXPERTS))
    torch.manual_seed(5)
    rows = torch.randn(41, 256)
    together = experts.forward(rows, [0, 0, 41, 0, 0, 0, 0, 0])
    for start, count in ((0, 1), (7, 2), (40, 1), (3, 17)):
        part = experts.forward(rows[start : start + count], [0, 0, count, 0, 0, 0, 0, 0])
        assert torch.equal(part, together[start : start + count])


def test_logits_stay_close(folders: tuple[Path, Path]) -> None:
    prompts = {0: list(range(5, 60)), 1: [9, 8, 7]}
    logits = [
        PagedRunner(load_all(folder)).forward(prompts, AttentionForm.PLAIN, all_rows=True)
        for folder in folders
    ]
    # Random weights have nothing that makes up for 10% of noise in the experts.
    assert (logits[1] - logits[0]).norm() < 0.25 * logits[0].norm()


def test_moved_between_slots(folders: tuple[Path, Path]) -> None:
    """As migration does it: read from the checkpoint into bytes, written over another expert, or
    copied from slot to slot."""
    config = ModelConfig.from_folder(folders[1])
    experts = load_layer(folders[1], (1, 2, EMPTY))
    slots = ExpertSlots(experts.slot_tensors)
    row = torch.empty(slots.slot_bytes, dtype=torch.uint8)
    reader = CheckpointExperts(folders[1], config, torch.device("cpu"), torch.float32)
    reader.read(0, 6, row)
    slots.write(2, row)
    slots.read(0, row)
    slots.write(1, row)
    moved, made = experts.slot_tensors, load_layer(folders[1], (1, 1, 6)).slot_tensors
    assert all(torch.equal(a, b) for a, b in zip(moved, made, strict=True))
    # Half a byte a weight, four bytes for each 128 of them.
    assert slots.slot_bytes == 3 * 256 * 128 * (1 / 2 + 4 / 128)


def test_one_scale_for_all_activations(folders: tuple[Path, Path], tmp_path: Path) -> None:
    static = with_config(folders[1], tmp_path / "static", moe_activation_scheme="static")
    tensors = load_file(static / "model.safetensors")
    scales = {"w1": 0.01, "w2": 0.03, "w3": 0.004}
    for name in tensors:
        if name.startswith(LAYER) and name.endswith("input_scale"):
            tensors[name] = torch.tensor(scales[name.split(".")[-2]])
    # The largest of the layer counts, whoever it belongs to.
    tensors[f"{LAYER}.experts.3.w1.input_scale"] = torch.tensor(2**-6, dtype=torch.bfloat16)
    save_file(tensors, static / "model.safetensors")
    experts = load_layer(static, (0, 1))
    assert experts.input_scales is not None
    assert [round(float(scale), 6) for scale in experts.input_scales] == [2**-6, 0.03]
    torch.manual_seed(6)
    rows = torch.randn(8, 256)
    rows[0, 0] = 40.0  # more than 448 times the scale: clipped
    got, wanted = experts.forward(rows, [8, 0]), want(static, rows, 0, (2**-6, 0.03))
    assert (got - wanted).norm() < 5e-3 * wanted.norm()
    assert (got - want(static, rows, 0)).norm() > 0.2 * wanted.norm()
    tensors[f"{LAYER}.experts.3.w1.input_scale"] = torch.tensor(float("nan"))
    tensors.pop(f"{LAYER}.experts.2.w2.input_scale")
    save_file(tensors, static / "model.safetensors")
    with pytest.raises(CheckpointError, match="input_scale"):
        load_layer(static, (0, 1))


def test_public_checkpoints_say_less(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Their configuration has the method only, scales may be FP32 and bytes unsigned."""
    public = with_config(folders[1], tmp_path / "public")
    fields = json.loads((public / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "w4afp8"}
    (public / "config.json").write_text(json.dumps(fields))
    tensors = load_file(public / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        if name.endswith("input_scale"):
            del tensors[name]
        elif name.endswith("_scale_inv"):
            tensors[name] = tensors[name].float()
        else:
            tensors[name] = tensors[name].view(torch.uint8)
    save_file(tensors, public / "model.safetensors")
    for got, same in zip(
        load_layer(public, (3, 4)).slot_tensors,
        load_layer(folders[1], (3, 4)).slot_tensors,
        strict=True,
    ):
        assert torch.equal(got, same)


PROBLEMS = {
    "gate_proj.weight": (torch.zeros(128, 64, dtype=torch.int8), r"\[128, 64\], not \[128, 128\]"),
    "gate_proj.weight_scale_inv": (torch.zeros(128, 3), r"is \[128, 3\], not \[128, 2\]"),
    "w4.input_scale": (torch.zeros(()), "unexpected: .*w4.input_scale"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_tensors_that_do_not_fit(folders: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    broken = with_config(folders[1], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[f"{LAYER}.experts.3.{name}"], message = PROBLEMS[name]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_layer(broken, (0,))


def test_refusals(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other_groups = with_config(folders[1], tmp_path / "groups", group_size=64)
    with pytest.raises(CheckpointError, match="group_size is 64, not 128"):
        ModelConfig.from_folder(other_groups)
    config = ModelConfig.from_folder(folders[1])
    with Checkpoint(folders[1]) as checkpoint:
        weights = Weights(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        with pytest.raises(ValueError, match="cannot be folded in"):
            load_experts(weights, config, LAYER, (0,), fold_shared=True)


def test_not_paired_with_what_it_was_made_from(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Latents behind int4 experts are not those behind the original ones."""
    static = with_config(folders[1], tmp_path / "static", moe_activation_scheme="static")
    prints = [
        kv_fingerprint(
            folder, ModelConfig.from_folder(folder), dtype_name="float32", page_tokens=64
        )
        for folder in (*folders, static)
    ]
    assert len(set(prints)) == 3
