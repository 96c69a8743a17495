"""Folders of random weights, made without anybody else's model class: sizes that FP8 blocks and
GPU kernels like."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.gemm.block_dequantise import BLOCK
from model.config import ModelConfig
from model.weights.tensor_names import SCALE_SUFFIX, main_tensors

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}


def make_random_folder(path: Path, *, fp8: bool = False, **overrides: object) -> Path:
    """`fp8` stores projections as public checkpoints do, in 128 x 128 blocks."""
    path.mkdir(parents=True, exist_ok=True)
    fields = CONFIG | overrides
    if fp8:
        fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK] * 2}
    (path / "config.json").write_text(json.dumps(fields))
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in main_tensors(ModelConfig.from_folder(path)).items():
        norm = "norm" in name
        value = (0.1 if norm else 0.07) * torch.randn(shape, generator=rng)
        tensors[name] = value + 1 if norm else value
        if fp8 and name.endswith(("_proj.weight", "_with_mqa.weight")):
            tensors[name], tensors[name + SCALE_SUFFIX] = quantise_blocks(value)
    save_file(tensors, path / "model.safetensors")
    return path


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float8_e4m3fn and [ceil(N / 128), ceil(K / 128)] float32."""
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    whole = weight.new_zeros(high * BLOCK, wide * BLOCK)
    whole[:rows, :columns] = weight
    blocks = whole.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / 448
    values = (blocks / scale[:, None, :, None]).view_as(whole)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale
