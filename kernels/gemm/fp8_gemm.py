"""Dense projection in FP8.

    out[t, n] = sum over k of x[t, k] * x_scale[t, k / 128] * w[n, k] * w_scale[n / 128, k / 128]

    x         [T, K]            float8_e4m3fn, contiguous
    x_scale   [T, K / 128]      float32; fastest with rows contiguous (`quantise`)
    weight    [N, K]            float8_e4m3fn, contiguous
    w_scale   [N / 128, K / 128] float32, rounded up at the edge of N
    out       [T, N]            bfloat16, summed in float32

K is a multiple of 128. A CUDA kernel for up to 128 tokens, DeepGEMM or Triton, whichever was
measured to be fastest for the shape; of the first and the last where DeepGEMM is not installed. All
are within TOLERANCE of the reference, relative by norm, most of which is rounding to bfloat16.

NOTE: the CUDA kernel reads weights while earlier kernels still run. They must not be written by a
kernel that lets the next one begin early (`kernels.build.dependent_launch_triton`).
"""

import torch

from kernels.build.fp8_gemm_blocks import DENSE
from kernels.build.operands import check_contiguous, check_operand
from kernels.build.paths import best_path, note
from kernels.gemm import fp8_gemm_cuda
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from kernels.gemm.fp8_gemm_choice import cluster_blocks, faster_path

TOLERANCE = 2e-3


def fp8_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    check_operands(x, x_scale, weight, w_scale)
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are no matrices")
    path = best_path("fp8_gemm", x.device)
    if path == "deep_gemm":
        path = faster_path(x.device, DENSE, len(x), *weight.shape) if len(x) else "triton"
    if path not in ("reference", "deep_gemm"):
        return fp8_gemm_own(x, x_scale, weight, w_scale)
    note("fp8_gemm", path)
    if path == "reference":
        return fp8_gemm_reference(x, x_scale, weight, w_scale)
    from kernels.gemm.fp8_gemm_deep_gemm import dense

    return dense((x, x_scale, weight, w_scale))


def fp8_gemm_own(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """By the kernels of this project: what runs where DeepGEMM is not installed."""
    clusters = cluster_blocks(x.device, len(x), *weight.shape)
    if clusters and len(x) and fp8_gemm_cuda.is_possible(x, x_scale, weight):
        note("fp8_gemm", "cuda")
        return fp8_gemm_cuda.dense((x, x_scale, weight, w_scale), blocks=clusters)
    from kernels.gemm.fp8_gemm_triton import dense

    note("fp8_gemm", "triton")
    return dense((x, x_scale, weight, w_scale))


def fp8_gemm_reference(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    values = x.float().unflatten(-1, (-1, BLOCK)) * x_scale.unsqueeze(-1)
    product = values.flatten(-2) @ block_dequantise(weight, w_scale, torch.float32).t()
    return product.to(torch.bfloat16)


def check_operands(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor
) -> None:
    """Raises ValueError unless the last dimensions, dtypes and devices fit together."""
    *lead, width = x.shape
    *experts, rows, columns = weight.shape
    if width % BLOCK or columns != width:
        raise ValueError(f"K must be a multiple of 128: x {width}, weight {columns}")
    groups = width // BLOCK
    check_operand("x", x, x.device, torch.float8_e4m3fn)
    check_operand("weight", weight, x.device, torch.float8_e4m3fn)
    check_operand("x_scale", x_scale, x.device, torch.float32, shape=(*lead, groups))
    shape = (*experts, -(-rows // BLOCK), groups)
    check_operand("w_scale", w_scale, x.device, torch.float32, shape=shape)
    check_contiguous(x=x, weight=weight)
