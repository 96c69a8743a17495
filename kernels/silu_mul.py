"""The gated activation between the two projections of an MLP.

out[t, i] = silu(x[t, i]) * x[t, I + i],   silu(a) = a / (1 + exp(-a))

x    [T, 2 I]  gate half first, float32 or bfloat16
out  [T, I]    same dtype
"""

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
