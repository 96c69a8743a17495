"""CUDA path of `kernels.gemm.fp8_gemm` for few tokens: built at first use, kept on disk."""

from pathlib import Path

import torch

from kernels.build.cuda_kernel import NUMBER, POINTER, CudaKernel
from kernels.build.fp8_gemm_clusters import MAX_ROWS, ClusterBlocks
from kernels.build.fp8_scales import Fp8Operands

_KERNEL = CudaKernel(
    Path(__file__).with_name("fp8_gemm.cu"),
    *(POINTER, POINTER, NUMBER, POINTER, POINTER, POINTER),
    *[NUMBER] * 10,
)
_OTHERWISE = "FP8 products of few tokens take their slower paths"


def is_possible(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is there, and takes these operands: up to MAX_ROWS tokens, N a multiple
    of 8, scales with rows contiguous and everything aligned to 16 bytes."""
    num_tokens = len(x)
    row_stride, group_stride = x_scale.stride()
    scales_fit = (row_stride == 1 or num_tokens == 1) and group_stride % 4 == 0
    return (
        num_tokens <= MAX_ROWS
        and weight.shape[0] % 8 == 0
        and scales_fit
        and group_stride >= num_tokens
        and all(each.data_ptr() % 16 == 0 for each in (x, x_scale, weight))
        and _KERNEL.is_built(_OTHERWISE)
    )


def dense(operands: Fp8Operands, *, blocks: ClusterBlocks) -> torch.Tensor:
    """For operands that are possible. Raises RuntimeError where it cannot be launched."""
    x, x_scale, weight, w_scale = operands
    (num_tokens, k), n = x.shape, weight.shape[0]
    out = x.new_empty(num_tokens, n, dtype=torch.bfloat16)
    _KERNEL.launch(
        x.device, x, x_scale, x_scale.stride(1), weight, w_scale.contiguous(), out, num_tokens, n,
        k, blocks.height(num_tokens), blocks.tokens_first, blocks.warpgroups, blocks.across,
        blocks.splits, blocks.num_stages(num_tokens, k), blocks.token_stages(num_tokens, k),
    )  # fmt: skip
    return out
