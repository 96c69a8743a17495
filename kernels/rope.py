"""Rotary position embedding on interleaved pairs, as DeepSeek's checkpoints have them.

(x[2i], x[2i+1])  ->  (x[2i] + j x[2i+1]) * rotation[i]     as complex numbers

x         [T, heads, R]  float32 or bfloat16, R even
rotation  [T, R / 2]     complex64: exp(j * position * frequency), times a common factor
out       [T, heads, R]  dtype of x, computed in float32
"""

import torch


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
    rotated = torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2)
    return rotated.to(x.dtype)
