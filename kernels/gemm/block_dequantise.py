"""Block-FP8 weights of public checkpoints back to a floating type.

    out[n, k] = weight[n, k] * scale_inv[n // 128, k // 128]

    weight     [N, K]                            float8_e4m3fn
    scale_inv  [ceil(N / 128), ceil(K / 128)]    float32 (or bfloat16)
    out        [N, K]                            `dtype`, multiplied in float32

Blocks at the right and lower edge may be cut off.
"""

import torch

from kernels.build.operands import check_operand

BLOCK = 128


def block_dequantise(
    weight: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if weight.dim() != 2:
        raise ValueError(f"weight must be [N, K], is {list(weight.shape)}")
    rows, columns = weight.shape
    check_operand("weight", weight, weight.device, torch.float8_e4m3fn)
    shape, floats = (-(-rows // BLOCK), -(-columns // BLOCK)), (torch.float32, torch.bfloat16)
    check_operand("scale_inv", scale_inv, weight.device, *floats, shape=shape)
    scale = scale_inv.float().repeat_interleave(BLOCK, dim=1)[:, :columns]
    scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return (weight.float() * scale).to(dtype)
