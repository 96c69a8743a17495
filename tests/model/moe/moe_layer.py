"""One MoE layer in each way that a checkpoint may store its experts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ep.dispatch.expert_shard import ExpertShard
from model.config import ModelConfig
from model.moe.moe import Moe
from model.w4afp8 import QUANT_METHOD, input_scale_name, is_routed_weight
from model.weights.checkpoint import Checkpoint
from model.weights.tensor_names import SCALE_SUFFIX
from model.weights.weights import LinearForm, Weights
from tests.model.random_folder import make_random_folder

FORMATS = ("plain", "fp8", "int4", "static int4")
SIZES = {"num_hidden_layers": 2, "n_routed_experts": 16, "hidden_size": 256}
HIDDEN = SIZES["hidden_size"]


def make_folders(root: Path) -> dict[str, Path]:
    """By format. The gate is stored in bfloat16, as it is in public checkpoints."""
    folders = {}
    for kind in FORMATS:
        folders[kind] = make_random_folder(root / kind, fp8=kind == "fp8", **SIZES)
        path = folders[kind] / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("gate.weight")]:
            tensors[name] = tensors[name].bfloat16()
        save_file(tensors, path)
        if "int4" in kind:
            make_int4(folders[kind], static="static" in kind)
    return folders


def make_int4(folder: Path, *, static: bool) -> None:
    """Random values in place of the matrices of routed experts."""
    scheme = "static" if static else "dynamic"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "moe_activation_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if is_routed_weight(name)]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randint(
            -128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8
        )
        scales = torch.rand(rows, columns // 128, generator=generator) + 0.5
        tensors[name + SCALE_SUFFIX] = scales * 0.02
        tensors[input_scale_name(name)] = torch.tensor(0.02)
    save_file(tensors, folder / "model.safetensors")


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
