"""Dense projection.

out[t, n] = sum over k of x[t, k] * weight[n, k]  (+ bias[n])

x       [T, K]  float32 or bfloat16
weight  [N, K]  as on disk in public checkpoints, same dtype
bias    [N]     or None
out     [T, N]  same dtype, accumulated in float32
"""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)
