"""Block-FP8 weights of public checkpoints back to a floating type.

    out[n, k] = weight[n, k] * scale_inv[n // 128, k // 128]

    weight     [N, K]                            float8_e4m3fn
    scale_inv  [ceil(N / 128), ceil(K / 128)]    float32 (or bfloat16)
    out        [N, K]                            `dtype`, multiplied in float32

Blocks at the right and lower edge may be cut off.
"""

import torch

BLOCK = 128


def block_dequantise(
    weight: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = weight.shape
    wanted = (-(-rows // BLOCK), -(-columns // BLOCK))
    assert scale_inv.shape == wanted, (tuple(scale_inv.shape), wanted)
    scale = scale_inv.float().repeat_interleave(BLOCK, dim=1)[:, :columns]
    scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return (weight.float() * scale).to(dtype)
