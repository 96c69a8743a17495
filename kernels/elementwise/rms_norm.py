"""Root-mean-square norm, with the residual addition in front of it and the quantisation behind it.

    rms_norm(x)[t]                = x[t] / sqrt(mean(x[t]^2) + eps) * weight
    add_rms_norm(x, residual)[t]  = rms_norm(x + residual)[t], and x + residual itself

    x, residual, out  [T, H]  float32 or bfloat16; rows of the first two may be slices
    weight            [H]     same dtype
    eps               inside the root; the mean is taken in float32
    x of add_...      may be a `kernels.elementwise.combine.Combination`, which is combined first
    quantised out     e4m3 and scales as `quantise` gives them, H a multiple of 128
    by a given scale  e4m3 as `kernels.elementwise.quantise` gives it for that, [] float32

The Triton path agrees with the reference within one bit of the last place; the sum is exact.
What is quantised is not rounded to bfloat16 before.
"""

import torch
import torch.nn.functional as F

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_contiguous, check_operand, check_shape
from kernels.build.paths import path_of
from kernels.elementwise.combine import Combination, Update, combined
from kernels.elementwise.quantise import check_scale, quantise_reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, as all of these do."""
    _check(x, None, weight)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch

        return launch(x, None, weight, eps)[0]
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised sum, sum). `residual` is not changed."""
    _check(x, residual, weight)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch

        return launch(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale)."""
    _check(x, None, weight, quantises=True)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch_quantise

        return launch_quantise(x, None, weight, eps)[:2]
    return rms_norm_quantise_reference(x, weight, eps)


def add_rms_norm_quantise(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, scale, sum)."""
    _check(x, residual, weight, quantises=True)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch_quantise

        return launch_quantise(x, residual, weight, eps)
    return add_rms_norm_quantise_reference(x, residual, weight, eps)


def add_rms_norm_both(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, quantised out, scale, sum)."""
    _check(x, residual, weight, quantises=True)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch_both

        return launch_both(x, residual, weight, eps)
    return add_rms_norm_both_reference(x, residual, weight, eps)


def add_rms_norm_all(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, quantised out, its scales, out quantised by the given `scale`, sum)."""
    _check(x, residual, weight, quantises=True)
    check_scale(residual, scale)
    if _has_kernel(x):
        from kernels.elementwise.rms_norm_triton import launch_all

        return launch_all(x, residual, weight, eps, scale)
    return add_rms_norm_all_reference(x, residual, weight, eps, scale)


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


def add_rms_norm_all_reference(
    x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, values, scales, total = add_rms_norm_both_reference(x, residual, weight, eps)
    normed = rms_norm_reference(total.float(), weight.float(), eps)
    return out, values, scales, quantise_reference(normed, scale=scale)[0], total


def _has_kernel(x: Update) -> bool:
    rows = x.rows if isinstance(x, Combination) else x
    return path_of("rms_norm", rows.device) == "triton" and rows.dim() == 2 and rows.stride(1) == 1


def _check(
    x: Update, residual: torch.Tensor | None, weight: torch.Tensor, *, quantises: bool = False
) -> None:
    rows = x.rows if isinstance(x, Combination) else x
    device, dtype, width = rows.device, rows.dtype, rows.shape[-1]
    check_operand("x", rows, device, *FLOATS)
    check_operand("weight", weight, device, dtype)
    check_shape("weight", weight, width)
    check_contiguous(weight=weight)
    if quantises and (rows.dim() != 2 or width % GROUP):
        raise ValueError(f"H = {width} of {rows.dim()} dimensions is not a multiple of {GROUP}")
    if residual is None:
        return
    check_operand("residual", residual, device, dtype)
    shape = (x.row_of.shape[1], width) if isinstance(x, Combination) else x.shape
    if residual.shape != shape or residual.stride(-1) != 1:
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(shape)}")
