"""The end of absorbed attention: a product per head, quantised for the next projection.

    values[t, h]  = latents[t, h] @ kv_b[h, D:]^T
    out, scale    = the values of all heads side by side, as `quantise` gives them

    latents  [T, heads, C]      bfloat16 or float32, contiguous; or splits of them, of one query a
                                row, which are joined here
    kv_b     [heads, D + V, C]  same dtype, contiguous
    out      [T, heads * V]     float8_e4m3fn
    scale    [T, heads * V / 128] float32

The faster paths are for bfloat16 and V = 128, where a head's values are one group: Triton, and CUDA
C++ for splits of many rows. They sum in float32, without rounding in between: the error is that of
e4m3, below 4e-2 relative by norm.
"""

import torch

from kernels.attention import absorb_splits_cuda
from kernels.attention.mla_decode_splits import Splits
from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_contiguous, check_operand
from kernels.build.paths import best_path, note
from kernels.elementwise.quantise import quantise
from kernels.gemm.head_linear import head_linear

_STEP = 128  # of the sum
_JOINED_ROWS = 32  # up to which splits are joined faster by a launch of their own


def absorb_values(
    latents: torch.Tensor | Splits, kv_b: torch.Tensor, nope_dim: int, *, follows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale); `nope_dim` is D. The kernel after it may begin before it ends.

    `follows`: it may be launched while the kernel before ends.
    After FlashMLA it must not: the second kernel of that is launched so itself, and where there
    is nothing to join it does not wait for the first. Raises ValueError for arguments that do not
    fit."""
    _check(latents, kv_b, nope_dim)
    path = note("absorb", path_for(latents, kv_b, nope_dim))
    if isinstance(latents, Splits):
        from kernels.attention import absorb_splits_triton
        from kernels.attention.mla_decode_triton import join_splits

        if path == "cuda":
            return absorb_splits_cuda.launch(latents, kv_b, nope_dim)
        if path == "triton" and len(latents.kv_lengths) <= absorb_splits_triton.MAX_ROWS:
            return absorb_splits_triton.launch(latents, kv_b, nope_dim)
        latents = join_splits(latents)
    if path == "triton":
        from kernels.attention.absorb_triton import launch

        return launch(latents, kv_b, nope_dim, follows=follows)
    values = latents.new_empty(*latents.shape[:2], kv_b.shape[1] - nope_dim)
    return quantise(head_linear(latents, kv_b[:, nope_dim:], out=values).flatten(1))


def _check(latents: torch.Tensor | Splits, kv_b: torch.Tensor, nope_dim: int) -> None:
    x = latents
    if isinstance(x, Splits):
        if x.num_queries != 1:
            raise ValueError(f"splits of {x.num_queries} queries a row")
        x = x.values
        check_operand("lse", latents.lse, x.device, torch.float32)
    if x.dim() != 3 or kv_b.dim() != 3 or x.shape[1:] != (kv_b.shape[0], kv_b.shape[2]):
        raise ValueError(f"latents {tuple(x.shape)} do not fit kv_b {tuple(kv_b.shape)}")
    if not 0 <= nope_dim < kv_b.shape[1]:
        raise ValueError(f"values after {nope_dim} of {kv_b.shape[1]} rows")
    check_operand("latents", x, kv_b.device, *FLOATS)
    check_operand("kv_b", kv_b, kv_b.device, x.dtype)
    check_contiguous(latents=x, kv_b=kv_b)


def path_for(latents: torch.Tensor | Splits, kv_b: torch.Tensor, nope_dim: int) -> str:
    """The path of `absorb_values`; "cublas" is the product of what no faster one takes."""
    path = best_path("absorb", kv_b.device)
    if path == "reference":
        return path
    if isinstance(latents, Splits):
        is_many = path == "cuda" and len(latents.kv_lengths) > _JOINED_ROWS
        if is_many and absorb_splits_cuda.is_possible(latents, kv_b, nope_dim):
            return path
        latents = latents.values
    is_group = kv_b.shape[1] - nope_dim == GROUP and kv_b.shape[2] % _STEP == 0
    return "triton" if is_group and latents.dtype == torch.bfloat16 else "cublas"
