"""Folders as AWQ, GPTQ and compressed-tensors write them, made of a plain one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model.w4afp8 import GROUP

Tensors = dict[str, torch.Tensor]

QUANTIZATION: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True},
            }
        },
    },
}
# What is int4 beside the experts; the rest stays as it is, as writers may have it.
ALSO_INT4 = ("o_proj", "kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "down_proj")


def pack(method: str, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """Of a matrix by the ends of names: values [N, K] and zero points [N, K / 128] from 0 to 15."""
    if method == "awq":
        order = (torch.arange(len(values)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).flatten()
        in_order = (values.t()[:, order], zeros.t()[:, order])
        return {
            "qweight": words(in_order[0]),
            "qzeros": words(in_order[1]),
            "scales": scales.t().contiguous(),
        }
    if method.startswith("gptq"):
        less = int(method == "gptq")
        return {
            "qweight": words(values).t().contiguous(),
            "qzeros": words((zeros.t().int() - less) % 16),
            "scales": scales.t().contiguous(),
            "g_idx": (torch.arange(values.shape[1]) // GROUP).int(),
        }
    packed = {
        "weight_packed": words(values),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if bool((zeros != 8).any()):
        packed["weight_zero_point"] = words(zeros.t()).t().contiguous()
    return packed


def words(values: torch.Tensor) -> torch.Tensor:
    """[R, 8 W] to [R, W] int32, the first in the lowest bits."""
    eights = values.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return eights.sum(-1).to(torch.int32)


def quantised(weight: torch.Tensor, zero: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, zero points and scales, rounded to nearest in groups of 128."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    values = (groups / scales.unsqueeze(-1).float()).round() + zero
    return values.clamp(0, 15).flatten(1), torch.full(scales.shape, zero), scales


def make_packed(
    plain: Path, folder: Path, method: str, *, zero: int = 8, expert_zero: int = 8
) -> tuple[Path, Path, Path]:
    """(the folder, the same as w4afp8, the same dequantised), of matrices whose zero points are
    all `zero`, those of experts `expert_zero`."""
    tensors, native, twin = load_file(plain / "model.safetensors"), Tensors(), Tensors()
    packed: Tensors = {}
    for name, weight in tensors.items():
        stem = name.removesuffix(".weight")
        is_expert = ".experts." in name
        if not (is_expert or stem.endswith(ALSO_INT4)):
            packed[name] = native[name] = twin[name] = weight
            continue
        one = quantised(weight, expert_zero if is_expert else zero)
        packed |= {f"{stem}.{end}": value for end, value in pack(method, *one).items()}
        values, zeros, scales = one
        signed = values - zeros.repeat_interleave(GROUP, 1)
        native[name] = twin[name] = signed * scales.float().repeat_interleave(GROUP, 1)
        if is_expert:
            pairs = (signed.int() & 15).unflatten(1, (-1, 2))
            native[name] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).view(torch.int8)
            native[f"{name}_scale_inv"] = scales
    fields = json.loads((plain / "config.json").read_text())
    w4afp8 = {"quant_method": "w4afp8"}
    return (
        save(folder / method, packed, fields | {"quantization_config": QUANTIZATION[method]}),
        save(folder / "native", native, fields | {"quantization_config": w4afp8}),
        save(folder / "twin", twin, fields),
    )


def save(folder: Path, tensors: Tensors, fields: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    own = {name: value.clone() for name, value in tensors.items()}
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
