"""Between the network in memory and a checkpoint folder in the public DeepSeek-V3 format.

transformers keeps the routed experts of a layer fused, [experts, 2 * width, hidden] and [experts,
hidden, width]; the public checkpoints have three matrices an expert. The MTP layer is stored as the
layer after the last.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from demo_model.training.block_fp8 import BLOCK, dequantise_blocks, quantise_blocks
from demo_model.training.network import BOS_ID, EOS_ID, Network, config_values
from demo_model.training.settings import ModelSizes

_SHARD_BYTES = 6 * 2**20
# As in the public checkpoints these stay BF16 (the balancing bias FP32), other matrices are FP8.
_UNQUANTISED = (
    "embed_tokens.weight",
    "lm_head.weight",
    "shared_head.head.weight",
    "eh_proj.weight",
    "gate.weight",
)
_MTP_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}


def save_checkpoint(network: Network, sizes: ModelSizes, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights in block FP8.

    The tokenizer is written elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_values(sizes)
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    _write_shards(folder, dict(_quantised(public_weights(network))))


def load_network(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    master: Path | None = None,
) -> Network:
    """Read a block-FP8 folder, dequantised, into transformers' model; `master` names other weights
    to take instead.

    Raises ValueError if a tensor is missing, left over or of another shape than config.json says.
    """
    network = Network(DeepseekV3Config.from_pretrained(folder))
    weights = load_file(master) if master else read_weights(folder)
    for name, target in _public_views(network):
        if name not in weights or weights[name].shape != target.shape:
            raise ValueError(f"{folder}: {name} is missing or not of shape {list(target.shape)}")
        target.copy_(weights.pop(name))
    if weights:
        raise ValueError(f"{folder}: tensors that no part of the model takes: {sorted(weights)}")
    network.to(dtype)
    for layer in network.moe_layers():
        layer.gate.e_score_correction_bias = layer.gate.e_score_correction_bias.float()
    return network.to(device).eval()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder by its public name, float32, block FP8 dequantised.

    Raises ValueError if an FP8 tensor has no scales.
    """
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored: dict[str, torch.Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        stored |= load_file(folder / file_name)
    exact = {}
    for name, tensor in stored.items():
        scale_name = f"{name}_scale_inv"
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype != torch.float8_e4m3fn:
            exact[name] = tensor.float()
        elif scale_name in stored:
            exact[name] = dequantise_blocks(tensor, stored[scale_name])
        else:
            raise ValueError(f"{folder}: {scale_name} is missing")
    return exact


def public_weights(network: Network) -> dict[str, torch.Tensor]:
    """Every tensor of the network under its public name, in the network's own precision."""
    return dict(_public_views(network))


def quantised_parameters(network: Network) -> list[torch.nn.Parameter]:
    """The parameters that a checkpoint keeps in FP8.

    Fused experts quantise as their parts do, being whole blocks.
    """
    return [
        parameter
        for name, parameter in network.named_parameters()
        if parameter.dim() > 1 and not name.endswith(_UNQUANTISED)
    ]


def _public_views(network: Network) -> Iterator[tuple[str, torch.Tensor]]:
    """(public name, detached view into the network) of each tensor."""
    config, mtp = network.config, f"model.layers.{network.config.num_hidden_layers}"
    for name, tensor in network.main.state_dict().items():
        yield from _split_experts(name, tensor, config)
    for name, tensor in network.mtp.state_dict().items():
        module, rest = name.split(".", 1)
        if module == "block":
            yield from _split_experts(f"{mtp}.{rest}", tensor, config)
        else:
            yield f"{mtp}.{_MTP_NAMES[module]}.{rest}", tensor
    yield f"{mtp}.embed_tokens.weight", network.main.model.embed_tokens.weight.detach()
    yield f"{mtp}.shared_head.head.weight", network.main.lm_head.weight.detach()


def _split_experts(
    name: str, tensor: torch.Tensor, config: DeepseekV3Config
) -> Iterator[tuple[str, torch.Tensor]]:
    prefix, _, matrix = name.rpartition(".experts.")
    width = config.moe_intermediate_size
    for expert in range(tensor.shape[0] if prefix else 0):
        target = f"{prefix}.experts.{expert}"
        if matrix == "gate_up_proj":
            yield f"{target}.gate_proj.weight", tensor[expert, :width]
            yield f"{target}.up_proj.weight", tensor[expert, width:]
        else:
            yield f"{target}.down_proj.weight", tensor[expert]
    if not prefix:
        yield name, tensor


def _quantised(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights.items():
        if tensor.dim() == 2 and not name.endswith(_UNQUANTISED):
            stored, scale = quantise_blocks(tensor)
            yield name, stored.cpu().contiguous()
            yield f"{name}_scale_inv", scale.cpu().contiguous()
        else:
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            yield name, tensor.to("cpu", dtype, copy=True).contiguous()


def _write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in weights.items():
        if shard_bytes > _SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total_bytes = sum(tensor.nbytes for tensor in weights.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
