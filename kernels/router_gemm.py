"""Logits of the gate: few tokens, few experts, a long sum.

    out[t, e] = sum over k of hidden[t, k] * weight[e, k]

    hidden  [T, K]  bfloat16 or float32, contiguous
    weight  [E, K]  same dtype, contiguous
    out     [T, E]  float32, summed in float32

The Triton path cuts K into splits, which the program that ends last adds up in their order: one
launch, the same bits each time. Many tokens go through torch's library. Within TOLERANCE of the
float64 result, relative by norm.
"""

import torch

from kernels.linear import linear
from kernels.paths import path_of

TOLERANCE = 1e-5
MANY_ROWS = 512  # from which on the library is faster


def router_gemm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for shapes or dtypes that do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit {tuple(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}")
    if path_of("router_gemm", hidden.device) == "triton" and hidden.dtype == torch.bfloat16:
        if len(hidden) >= MANY_ROWS:
            return torch.mm(hidden, weight.t(), torch.float32)
        from kernels.router_gemm_triton import launch

        return launch(hidden, weight)
    return router_gemm_reference(hidden, weight)


def router_gemm_reference(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(hidden.float(), weight.float())
