"""Activations to FP8, one scale for 128 values of a row.

    scale[t, g] = max over the group of |x| / 448        at least SMALLEST / 448
    out[t, k]   = e4m3(x[t, k] / scale[t, k / 128])

    x       [T, K], whose rows may be slices of longer ones, or masked [E, C, K]  bfloat16 or
            float32, K a multiple of 128
    counts  [E] int32, masked: rows of each expert; those behind are neither read nor written
    out     shape of x  float8_e4m3fn
    scale   [T, K / 128] or [E, C, K / 128] float32, rows contiguous in memory (as matrix products
            on Hopper fetch them), their number padded to a multiple of 4

The Triton path gives the bits of the reference.
"""

import torch

from kernels.paths import path_of

GROUP = 128
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-12  # a group of zeros still needs a scale


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale) of all rows. Raises ValueError for a shape or dtype that does not fit."""
    check(x, num_dims=2)
    if path_of("quantise", x.device) == "triton":
        from kernels.quantise_triton import launch

        return launch(x.unsqueeze(0), None, squeeze=True)
    return quantise_reference(x)


def quantise_masked(x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale) of the first `counts[e]` rows of each expert."""
    check(x, num_dims=3)
    check_counts(x, counts)
    if path_of("quantise", x.device) == "triton":
        from kernels.quantise_triton import launch

        return launch(x, counts, squeeze=False)
    return quantise_masked_reference(x, counts)


def quantise_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(dim=-1).clamp_min_(SMALLEST)
    # NOTE: a tensor, because on a GPU torch divides by a number with its rounded reciprocal.
    largest = torch.full_like(peak, LARGEST)
    out = (groups * (largest / peak).unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = empty_scales(x)
    scale.copy_(peak / largest)
    return out.flatten(-2), scale


def quantise_masked_reference(
    x: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), empty_scales(x)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count], scale[expert, :count] = quantise_reference(x[expert, :count])
    return out, scale


def empty_scales(x: torch.Tensor) -> torch.Tensor:
    """[..., rows, K / 128] float32 with rows contiguous and padded to 16 bytes."""
    *lead, num_rows, width = x.shape
    padded = -(-num_rows // 4) * 4
    scales = x.new_empty(*lead, width // GROUP, padded, dtype=torch.float32)
    return scales.transpose(-1, -2)[..., :num_rows, :]


def check(x: torch.Tensor, *, num_dims: int) -> None:
    """Raises ValueError when `x` is not what this file's docstring says."""
    has_rows = x.is_contiguous() or (num_dims == 2 and x.stride(-1) == 1)
    if x.dim() != num_dims or not has_rows:
        raise ValueError(f"x must be contiguous with {num_dims} dimensions, is {tuple(x.shape)}")
    if x.shape[-1] % GROUP:
        raise ValueError(f"K = {x.shape[-1]} is not a multiple of {GROUP}")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bfloat16 or float32, is {x.dtype}")


def check_counts(x: torch.Tensor, counts: torch.Tensor) -> None:
    """Raises ValueError when `counts` does not fit `x` [E, C, ...]."""
    if counts.shape != x.shape[:1] or counts.dtype != torch.int32:
        raise ValueError(f"counts must be [{x.shape[0]}] int32, is {tuple(counts.shape)}")
    if counts.device != x.device:
        raise ValueError(f"counts are on {counts.device}, x on {x.device}")
