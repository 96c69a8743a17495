"""Root-mean-square norm, with and without the residual addition in front of it.

rms_norm(x)[t]                = x[t] / sqrt(mean(x[t]^2) + eps) * weight
add_rms_norm(x, residual)[t]  = rms_norm(x + residual)[t], and x + residual itself

x, residual, out  [T, H]  float32 or bfloat16
weight            [H]     same dtype
eps               inside the root; the mean is taken in float32
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised sum, sum). `residual` is not changed."""
    total = x + residual
    return rms_norm(total, weight, eps), total
