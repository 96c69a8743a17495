"""Activations to FP8, one scale for 128 values of a row.

    scale[t, g] = max over the group of |x| / 448        at least SMALLEST / 448
    out[t, k]   = e4m3(x[t, k] / scale[t, k / 128])

    given: out[t, k] = e4m3(x[t, k] * (1 / scale)), clamped to +-448, of one scale that the caller
           has, float32 [] on the device of x; it is what comes back as `scale`, too

    x       [T, K], whose rows may be slices of longer ones, or masked [E, C, K]  bfloat16 or
            float32, K a multiple of 128
    counts  [E] int32, masked: rows of each expert; further ones are neither read nor written
    out     shape of x  float8_e4m3fn
    scale   [T, K / 128] or [E, C, K / 128]; `kernels.build.fp8_scales` says where they lie

The Triton path gives the bits of the reference.
"""

import torch

from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.build.operands import FLOATS, check_contiguous, check_operand
from kernels.build.paths import path_of


def quantise(
    x: torch.Tensor, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale) of all rows. Raises ValueError for a shape or dtype that does not fit."""
    check(x, num_dims=2)
    check_scale(x, scale)
    if path_of("quantise", x.device) == "triton":
        from kernels.elementwise.quantise_triton import launch

        return launch(x, scale=scale)
    return quantise_reference(x, scale=scale)


def quantise_reference(
    x: torch.Tensor, counts: torch.Tensor | None = None, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if counts is not None:
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = empty_scales(x) if scale is None else scale
        for expert, count in enumerate(counts.tolist()):
            out[expert, :count], own = quantise_reference(x[expert, :count], scale=scale)
            if scale is None:
                scales[expert, :count] = own
        return out, scales
    if scale is not None:
        values = x.float() * (1 / scale)
        return values.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
    groups = x.float().unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(dim=-1).clamp_min_(SMALLEST)
    # NOTE: a tensor, because on a GPU torch divides by a number with its rounded reciprocal.
    largest = torch.full_like(peak, LARGEST)
    out = (groups * (largest / peak).unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = empty_scales(x)
    scale.copy_(peak / largest)
    return out.flatten(-2), scale


def check(x: torch.Tensor, *, num_dims: int, multiple: int = GROUP) -> None:
    """Raises ValueError when `x` is not what this file's docstring says, K of such a multiple."""
    has_rows = x.is_contiguous() or (num_dims == 2 and x.stride(-1) == 1)
    if x.dim() != num_dims or not has_rows:
        raise ValueError(f"x must be contiguous with {num_dims} dimensions, is {tuple(x.shape)}")
    if x.shape[-1] % multiple:
        raise ValueError(f"K = {x.shape[-1]} is not a multiple of {multiple}")
    check_operand("x", x, x.device, *FLOATS)


def check_scale(x: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raises ValueError for a given scale that is not one float32 on the device of `x`."""
    if scale is not None:
        check_operand("scale", scale, x.device, torch.float32)
        if scale.numel() != 1:
            raise ValueError(f"a given scale is one number, not {tuple(scale.shape)}")


def check_counts(x: torch.Tensor, counts: torch.Tensor) -> None:
    """Raises ValueError when `counts` does not fit `x` [E, C, ...]."""
    check_operand("counts", counts, x.device, torch.int32, shape=x.shape[:1])
    check_contiguous(counts=counts)
