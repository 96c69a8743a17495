"""CUDA path of `absorb` on splits of latents, for Hopper: bfloat16, C = 512, V = 128.

Built at first use and kept by `cuda_build`. `kv_lengths` and `kv_b` are read while earlier kernels
still run: neither may be written by a kernel that lets the next one begin early.
"""

from pathlib import Path

import torch

from kernels.attention.mla_decode_splits import Splits
from kernels.build.cuda_kernel import NUMBER, POINTER, CudaKernel
from kernels.build.fp8_scales import GROUP, empty_scales

LATENT_DIM = 512
_OTHERWISE = "splits of attention are joined by a kernel of their own"
_KERNEL = CudaKernel(Path(__file__).with_name("absorb_splits.cu"), *[POINTER] * 6, *[NUMBER] * 6)


def is_possible(splits: Splits, kv_b: torch.Tensor, nope_dim: int) -> bool:
    """Whether the kernel is there, and takes these operands."""
    return (
        splits.num_queries == 1
        and splits.values.dtype == torch.bfloat16
        and kv_b.shape[1:] == (nope_dim + GROUP, LATENT_DIM)
        and kv_b.is_contiguous()
        and kv_b.data_ptr() % 16 == 0
        and _KERNEL.is_built(_OTHERWISE)
    )


def launch(splits: Splits, kv_b: torch.Tensor, nope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `absorb.absorb_values`, for operands that are possible. It may begin early, and
    lets the kernel after it do so. Raises RuntimeError where it cannot be launched."""
    num_rows, num_heads = len(splits.kv_lengths), len(kv_b)
    out = splits.values.new_empty(num_rows, num_heads * GROUP, dtype=torch.float8_e4m3fn)
    scale = empty_scales(out)
    _KERNEL.launch(
        out.device, splits.values, splits.lse, splits.kv_lengths, kv_b, out, scale, num_rows,
        num_heads, splits.num_parts, splits.min_tiles, nope_dim, scale.stride(1),
    )  # fmt: skip
    return out, scale
