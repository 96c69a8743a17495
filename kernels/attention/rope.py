"""Rotary position embedding on interleaved pairs, as DeepSeek's checkpoints have them.

(x[2i], x[2i+1])  ->  (x[2i] + j x[2i+1]) * rotation[i]     as complex numbers

x         [T, heads, R]  float32 or bfloat16, R even
rotation  [T, R / 2]     complex64: exp(j * position * frequency), times a common factor
out       [T, heads, R]  dtype of x, computed in float32
"""

import torch

from kernels.build.operands import FLOATS, check_operand


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"x must be [T, heads, R] with R even, is {list(x.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    shape = (len(x), x.shape[2] // 2)
    check_operand("rotation", rotation, x.device, torch.complex64, shape=shape)
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
    rotated = torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2)
    return rotated.to(x.dtype)
