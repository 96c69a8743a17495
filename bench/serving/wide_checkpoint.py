"""A copy of the demo model in which tokens are wider and attention has DeepSeek-V3's own sizes, and
that computes the same: DeepEP's low-latency kernels know some widths only, FlashMLA and our kernel
one shape of attention, and the demo model's are none of them.

Everything new is zero. A root mean square over `factor` times as many values is smaller by
sqrt(factor), which the norms' weights make up for: without rounding where that is a power of two.
Queries make up for the softmax's other scale in the same way. Weights of attention become FP32:
their rows change places, and with them their blocks of FP8 scales.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.gemm.block_dequantise import BLOCK
from model.attention.rotation import blend_bound
from model.config import ModelConfig
from model.weights.checkpoint import Checkpoint
from model.weights.stored import SINGLE
from model.weights.tensor_names import SCALE_SUFFIX, main_tensors

# Over whole tokens.
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
# DeepSeek-V3's, but for half of its heads.
HEADS, LATENT, NOPE, ROPE, VALUE = 64, 512, 128, 64, 128


def write_wide(folder: Path, output: Path, factor: int) -> Path:
    """`output` is made; MTP layers are left out. BF16 or block FP8, not int4.

    ValueError for a `factor` whose root is no power of two, CheckpointError for a folder that
    cannot be read, OSError for one that cannot be written.
    """
    root = _root(factor)
    config = ModelConfig.from_folder(folder)
    output.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, output)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields |= {
        "hidden_size": config.hidden_size * factor,
        "rms_norm_eps": fields["rms_norm_eps"] / factor,
        "num_nextn_predict_layers": 0,
        **_attention_fields(config, fields),
    }
    (output / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    wanted = main_tensors(ModelConfig.from_folder(output))
    tensors = {}
    with Checkpoint(folder) as checkpoint:
        for name, shape in wanted.items():
            if ".self_attn." in name and "q_a_" not in name:
                value = _attention(name, checkpoint.read(name, torch.float32), config)
                tensors[name] = _filled_up(value, shape, 0)
                continue
            value = checkpoint.raw(name)
            tensors[name] = _filled_up(value / root if name.endswith(NORMS) else value, shape, 0)
            if checkpoint.is_fp8(name):
                scales = tuple(-(-size // BLOCK) for size in shape)
                scale = checkpoint.raw(name + SCALE_SUFFIX)
                tensors[name + SCALE_SUFFIX] = _filled_up(scale, scales, 1)
    save_file(tensors, output / SINGLE, metadata={"format": "pt"})
    return output


def _root(factor: int) -> int:
    root = math.isqrt(factor)
    if root * root != factor or root & (root - 1):
        raise ValueError(f"the root of {factor} is no power of two")
    return root


def _attention_fields(config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's bounds are such that each frequency of before is there, between new ones."""
    bounds = {}
    if (rope := config.rope).yarn:
        old = config.qk_rope_head_dim
        low, high = (blend_bound(rope, old, turns) for turns in (rope.beta_fast, rope.beta_slow))
        inside = {"beta_fast": math.floor(low) + 0.1, "beta_slow": math.ceil(high) - 0.1}
        for name, dim in inside.items():
            turns = math.exp(dim * 2 * math.log(rope.theta) / old)
            bounds[name] = rope.original_max_position / (2 * math.pi * turns)
    return {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "rope_scaling": fields["rope_scaling"] and fields["rope_scaling"] | bounds,
    }


def _attention(name: str, value: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """A tensor of one layer with what is new in its place; the hidden size stays."""
    heads, latent = config.num_heads, config.kv_lora_rank
    nope, width = config.qk_nope_head_dim, value.shape[-1]
    more = _root(LATENT // latent)
    if "kv_a_layernorm" in name:
        return torch.cat((value / more, value.new_zeros(LATENT - latent)))
    if "kv_a_proj" in name:  # latents as much larger as their mean square is over more of them
        wide = value.new_zeros(LATENT + ROPE, width)
        wide[:latent] = value[:latent] * more
        wide[LATENT:] = _turning(value[latent:])
        return wide
    if "q_b_proj" in name:
        per_head = value.view(heads, -1, width) * _root((NOPE + ROPE) // config.qk_head_dim)
        wide = value.new_zeros(HEADS, NOPE + ROPE, width)
        wide[:heads, :nope] = per_head[:, :nope]
        wide[:heads, NOPE:] = _turning(per_head[:, nope:])
        return wide.flatten(0, 1)
    if "kv_b_proj" in name:
        per_head = value.view(heads, -1, latent)
        wide = value.new_zeros(HEADS, NOPE + VALUE, LATENT)
        wide[:heads, :nope, :latent] = per_head[:, :nope]
        wide[:heads, NOPE : NOPE + config.v_head_dim, :latent] = per_head[:, nope:]
        return wide.flatten(0, 1)
    wide = value.new_zeros(len(value), HEADS, VALUE)
    wide[:, :heads, : config.v_head_dim] = value.view(len(value), heads, -1)
    return wide.flatten(1)


def _turning(value: torch.Tensor) -> torch.Tensor:
    """[..., R, W] -> [..., ROPE, W]: pairs at the places of their own frequency."""
    pairs = value.unflatten(-2, (-1, 2))
    count = pairs.shape[-3]
    wide = value.new_zeros(*pairs.shape[:-3], ROPE // 2, 2, value.shape[-1])
    wide[..., :: ROPE // 2 // count, :, :] = pairs
    return wide.flatten(-3, -2)


def _filled_up(value: torch.Tensor, shape: tuple[int, ...], filling: float) -> torch.Tensor:
    """`value` in the corner of `shape`."""
    if tuple(value.shape) == tuple(shape):
        return value.contiguous()
    # Not every operation knows FP8.
    wide = torch.full(shape, filling, dtype=torch.float32).to(value.dtype)
    wide[tuple(slice(size) for size in value.shape)] = value
    return wide
