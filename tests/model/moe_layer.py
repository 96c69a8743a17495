"""One MoE layer in each way that a checkpoint may store its experts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ep.expert_shard import ExpertShard
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.moe import Moe
from model.quantize import main
from model.weights import LinearForm, Weights
from tests.model.random_folder import make_random_folder

FORMATS = ("plain", "fp8", "int4", "static int4")
SIZES = {"num_hidden_layers": 2, "n_routed_experts": 16, "hidden_size": 256}
HIDDEN = SIZES["hidden_size"]


def make_folders(root: Path) -> dict[str, Path]:
    """By format. The gate is stored in bfloat16, as it is in public checkpoints."""
    plain = make_random_folder(root / "plain", **SIZES)
    _halve_gate(plain)
    fp8 = make_random_folder(root / "fp8", fp8=True, **SIZES)
    _halve_gate(fp8)
    int4, static = root / "int4", root / "static"
    for folder in (int4, static):
        assert main(["--model", str(plain), "--output", str(folder)]) == 0
    fields = json.loads((static / "config.json").read_text())
    fields["quantization_config"]["moe_activation_scheme"] = "static"
    (static / "config.json").write_text(json.dumps(fields))
    return dict(zip(FORMATS, (plain, fp8, int4, static), strict=True))


def load_moe(
    folder: Path,
    *,
    shard: ExpertShard | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    linear: LinearForm = "fp8",
) -> Moe:
    config = ModelConfig.from_folder(folder)
    shard = shard or ExpertShard.alone(config.num_moe_layers, config.num_experts, device)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        weights = Weights(
            checkpoint=checkpoint, device=torch.device(device), dtype=dtype, linear=linear
        )
        return Moe.load(weights, config, "model.layers.1.mlp", shard, 0)


def padded(x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] with rows behind it whose numbers would show; which of [B] are real."""
    more = x.new_full((num_rows - len(x), x.shape[1]), 30.0)
    more[:, ::2] = -20.0
    return torch.cat((x, more)), torch.arange(num_rows, device=x.device) < len(x)


def _halve_gate(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("gate.weight"):
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, path)
