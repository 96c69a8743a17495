"""Logits of the gate: few tokens, few experts, a long sum.

    out[t, e] = sum over k of hidden[t, k] * weight[e, k]

    hidden  [T, K]  bfloat16 or float32, contiguous
    weight  [E, K]  same dtype, contiguous
    out     [T, E]  float32, summed in float32

For few tokens Triton reads each expert's weights once, all at once. For some, thread blocks of a
CUDA kernel share sums in clusters; or the Triton program of a sum that ends last adds up its parts.
Both add in the same order each time. Many tokens go through torch's library. All are within
TOLERANCE of the float64 result, relative by norm.

NOTE: weights are read while earlier kernels still run. They must not be written by a kernel that
lets the next one begin early (`kernels.build.dependent_launch_triton`).
"""

import torch

from kernels.build.operands import FLOATS, check_operand
from kernels.build.paths import best_path, note
from kernels.gemm import router_gemm_cuda
from kernels.gemm.linear import linear

TOLERANCE = 1e-5
FEW_ROWS = 2  # up to which Triton is faster than the CUDA kernel
MANY_ROWS = 256  # from which on the library is faster


def router_gemm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit {tuple(weight.shape)}")
    check_operand("hidden", hidden, hidden.device, *FLOATS)
    check_operand("weight", weight, hidden.device, hidden.dtype)
    path = note("router_gemm", path_for(hidden, weight))
    if path == "reference":
        return router_gemm_reference(hidden, weight)
    if path == "cublas":
        return torch.mm(hidden, weight.t(), torch.float32)
    if path == "cuda":
        return router_gemm_cuda.launch(hidden, weight)
    from kernels.gemm.router_gemm_triton import launch

    return launch(hidden, weight)


def path_for(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    """ "cublas" is torch's library."""
    path = best_path("router_gemm", hidden.device)
    if path == "reference" or hidden.dtype != torch.bfloat16:
        return "reference"
    if len(hidden) >= MANY_ROWS:
        return "cublas"
    is_some = path == "cuda" and len(hidden) > FEW_ROWS
    return "cuda" if is_some and router_gemm_cuda.is_possible(hidden, weight) else "triton"


def router_gemm_reference(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(hidden.float(), weight.float())
