"""Root-mean-square norm, with the residual addition before it and the quantisation after it.

    rms_norm(x)[t]             = x[t] / sqrt(mean(x[t]^2) + eps) * weight
    rms_norms(x, residual)[t]  = rms_norm(x + residual)[t], and x + residual itself

    x, residual, out  [T, H]  float32 or bfloat16; rows of the first two may be slices
    weight            [H]     same dtype
    eps               inside the root; the mean is taken in float32
    x of rms_norms    may be a `kernels.elementwise.combine.Combination`, which is combined first
    quantised out     e4m3 and scales as `quantise` gives them, H a multiple of 128
    by a given scale  e4m3 as `kernels.elementwise.quantise` gives it for that, [] float32

The Triton path agrees with the reference within one bit of the last place; the sum is exact.
What is quantised is not rounded to bfloat16 before.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_contiguous, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.combine import Combination, Update, combined
from kernels.elementwise.quantise import check_scale, quantise_reference

Norms: TypeAlias = tuple[torch.Tensor, ...]  # as `rms_norms` gives them


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, as the other does."""
    return rms_norms(x, None, weight, eps)[0]


def rms_norms(
    x: Update,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    plain: bool = True,
    quantises: bool = False,
    scale: torch.Tensor | None = None,
) -> Norms:
    """(out, quantised out, its scales, out quantised by the given `scale`, sum): None where it is
    not wanted; the sum is x itself without a residual, which is not changed."""
    _check(x, residual, weight, quantises=quantises)
    rows = x.rows if isinstance(x, Combination) else x
    check_scale(rows, scale)
    wanted: dict[str, Any] = {"plain": plain, "quantises": quantises, "scale": scale}
    if path_of("rms_norm", rows.device) == "triton" and rows.dim() == 2 and rows.stride(1) == 1:
        from kernels.elementwise.rms_norm_triton import launch

        return launch(x, residual, weight, eps, **wanted)
    return norm_reference(x, residual, weight, eps, **wanted)


def norm_reference(
    x: Update,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    plain: bool = True,
    quantises: bool = False,
    scale: torch.Tensor | None = None,
) -> Norms:
    total = combined(x) if residual is None else combined(x) + residual
    values = scales = given = None
    if quantises:
        values, scales = quantise_reference(_rms_norm(total.float(), weight.float(), eps))
    if scale is not None:
        normed = _rms_norm(total.float(), weight.float(), eps)
        given, _ = quantise_reference(normed, scale=scale)
    return _rms_norm(total, weight, eps) if plain else None, values, scales, given, total


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _check(
    x: Update, residual: torch.Tensor | None, weight: torch.Tensor, *, quantises: bool = False
) -> None:
    rows = x.rows if isinstance(x, Combination) else x
    device, dtype, width = rows.device, rows.dtype, rows.shape[-1]
    check_operand("x", rows, device, *FLOATS)
    check_operand("weight", weight, device, dtype, shape=(width,))
    check_contiguous(weight=weight)
    if quantises and (rows.dim() != 2 or width % GROUP):
        raise ValueError(f"H = {width} of {rows.dim()} dimensions is not a multiple of {GROUP}")
    if residual is None:
        return
    check_operand("residual", residual, device, dtype)
    shape = (x.row_of.shape[1], width) if isinstance(x, Combination) else x.shape
    if residual.shape != shape or residual.stride(-1) != 1:
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(shape)}")
