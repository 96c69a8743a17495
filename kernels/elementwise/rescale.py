"""FP8 activations with a scale for each 128 values of a row to one scale for the whole tensor, for
checkpoints whose experts have static input scales, where something else has quantised before.

    out[e, c, k] = e4m3(x[e, c, k] * scale[e, c, k / 128] / tensor_scale), clamped to +-448

    x             [E, C, K]        float8_e4m3fn
    scale         [E, C, K / 128]  float32, any strides
    tensor_scale  []               float32, on the device
    counts        [E] int32: rows of each expert; further ones are neither read nor written
    out           [E, C, K]        float8_e4m3fn

The Triton path gives the bits of the reference. Of normal values the result is 4.4% by norm off
what one rounding, with `tensor_scale` alone, would have given.
"""

import torch

from kernels.build.fp8_scales import GROUP, LARGEST
from kernels.build.operands import check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import check_counts, check_scale


def rescale(
    x: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor,
    counts: torch.Tensor,
    *,
    expected_rows: int = 0,
) -> torch.Tensor:
    """`expected_rows` of an expert, 0: unknown. Raises ValueError for shapes, dtypes or
    devices that do not fit."""
    if x.dtype != torch.float8_e4m3fn or x.dim() != 3 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [E, C, K] float8_e4m3fn, is {x.dtype}")
    if x.shape[2] % GROUP or scale.shape != (*x.shape[:2], x.shape[2] // GROUP):
        raise ValueError(f"scale {tuple(scale.shape)} does not fit x {tuple(x.shape)}")
    check_operand("scale", scale, x.device, torch.float32)
    check_scale(x, tensor_scale)
    check_counts(x, counts)
    if path_of("rescale", x.device) == "triton":
        from kernels.elementwise.rescale_triton import launch

        return launch(x, scale, tensor_scale, counts, expected_rows)
    return rescale_reference(x, scale, tensor_scale, counts)


def rescale_reference(
    x: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(x)
    for expert, count in enumerate(counts.tolist()):
        groups = x[expert, :count].float().unflatten(-1, (-1, GROUP))
        values = groups * (scale[expert, :count] / tensor_scale).unsqueeze(-1)
        out[expert, :count] = values.clamp_(-LARGEST, LARGEST).flatten(1).to(out.dtype)
    return out
