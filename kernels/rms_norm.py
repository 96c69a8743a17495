"""Root-mean-square norm, with the residual addition in front of it and the quantisation behind it.

    rms_norm(x)[t]                = x[t] / sqrt(mean(x[t]^2) + eps) * weight
    add_rms_norm(x, residual)[t]  = rms_norm(x + residual)[t], and x + residual itself

    x, residual, out  [T, H]  float32 or bfloat16; rows of the first two may be slices
    weight            [H]     same dtype
    eps               inside the root; the mean is taken in float32
    x of add_...      may be a `kernels.combine.Combination`, which is combined first
    quantised out     e4m3 and scales as `kernels.quantise` gives them, H a multiple of 128

The Triton path agrees with the reference within one bit of the last place; the sum is exact.
What is quantised is not rounded to bfloat16 before.
"""

from typing import TypeAlias

import torch
import torch.nn.functional as F

from kernels.combine import Combination
from kernels.paths import path_of
from kernels.quantise import GROUP, quantise_reference

Update: TypeAlias = torch.Tensor | Combination


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if _has_kernel(x):
        from kernels.rms_norm_triton import launch

        return launch(x, None, weight, eps)[0]
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised sum, sum). `residual` is not changed."""
    if _has_kernel(x):
        from kernels.rms_norm_triton import launch

        return launch(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale)."""
    _check_width(x)
    if _has_kernel(x):
        from kernels.rms_norm_triton import launch_quantise

        return launch_quantise(x, None, weight, eps)[:2]
    return rms_norm_quantise_reference(x, weight, eps)


def add_rms_norm_quantise(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, scale, sum)."""
    _check_width(residual)
    if _has_kernel(x):
        from kernels.rms_norm_triton import launch_quantise

        return launch_quantise(x, residual, weight, eps)
    return add_rms_norm_quantise_reference(x, residual, weight, eps)


def add_rms_norm_both(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, quantised out, scale, sum)."""
    _check_width(residual)
    if _has_kernel(x):
        from kernels.rms_norm_triton import launch_both

        return launch_both(x, residual, weight, eps)
    return add_rms_norm_both_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = combined(x) + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_quantise_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_reference(rms_norm_reference(x.float(), weight.float(), eps))


def add_rms_norm_quantise_reference(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = combined(x) + residual
    return *rms_norm_quantise_reference(total, weight, eps), total


def add_rms_norm_both_reference(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, total = add_rms_norm_reference(x, residual, weight, eps)
    return out, *rms_norm_quantise_reference(total, weight, eps), total


def combined(x: Update) -> torch.Tensor:
    return x.combined() if isinstance(x, Combination) else x


def _has_kernel(x: Update) -> bool:
    rows = x.rows if isinstance(x, Combination) else x
    return path_of("rms_norm", rows.device) == "triton" and rows.dim() == 2 and rows.stride(1) == 1


def _check_width(residual: torch.Tensor) -> None:
    if residual.shape[1] % GROUP:
        raise ValueError(f"H = {residual.shape[1]} is not a multiple of {GROUP}")
