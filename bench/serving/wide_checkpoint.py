"""A copy of a checkpoint folder in which tokens are wider, and that computes the same: DeepEP's
low-latency kernels know some widths only, and the demo model's is none of them.

Everything new is zero. A root mean square over `factor` times as many values is smaller by
sqrt(factor), which the norms' weights make up for: without rounding where that is a power of two.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.gemm.block_dequantise import BLOCK
from model.config import ModelConfig
from model.weights.checkpoint import Checkpoint
from model.weights.stored import SINGLE
from model.weights.tensor_names import SCALE_SUFFIX, main_tensors

# Over whole tokens.
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def write_wide(folder: Path, output: Path, factor: int) -> Path:
    """`output` is made; MTP layers are left out. BF16 or block FP8, not int4.

    ValueError for a `factor` whose root is no power of two, CheckpointError for a folder that
    cannot be read, OSError for one that cannot be written.
    """
    root = math.isqrt(factor)
    if root * root != factor or root & (root - 1):
        raise ValueError(f"the root of {factor} is no power of two")
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
    }
    (output / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    wanted = main_tensors(ModelConfig.from_folder(output))
    tensors = {}
    with Checkpoint(folder) as checkpoint:
        for name, shape in wanted.items():
            value = checkpoint.raw(name)
            tensors[name] = _filled_up(value / root if name.endswith(NORMS) else value, shape, 0)
            if checkpoint.is_fp8(name):
                scales = tuple(-(-size // BLOCK) for size in shape)
                scale = checkpoint.raw(name + SCALE_SUFFIX)
                tensors[name + SCALE_SUFFIX] = _filled_up(scale, scales, 1)
    save_file(tensors, output / SINGLE, metadata={"format": "pt"})
    return output


def _filled_up(value: torch.Tensor, shape: tuple[int, ...], filling: float) -> torch.Tensor:
    """`value` in the corner of `shape`."""
    if tuple(value.shape) == tuple(shape):
        return value.contiguous()
    # Not every operation knows FP8.
    wide = torch.full(shape, filling, dtype=torch.float32).to(value.dtype)
    wide[tuple(slice(size) for size in value.shape)] = value
    return wide
