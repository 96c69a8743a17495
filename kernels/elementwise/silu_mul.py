"""The gated activation between the two projections of an MLP, alone and with the quantisation of
what it gives.

    out[t, i] = silu(x[t, i]) * x[t, I + i],   silu(a) = a / (1 + exp(-a))

    x       [T, 2 I] or masked [E, C, 2 I]  gate half first, float32 or bfloat16
    counts  [E] int32, masked: rows of each expert; further ones are neither read nor written
    out     [T, I] or [E, C, I] same dtype; quantised: e4m3 and scales as `quantise` gives
            them, with a given scale where that is asked for

Quantised from float32, without rounding to bfloat16 between. The Triton path agrees with the
reference to the last bit or the one beside it (exp).
"""

import torch
import torch.nn.functional as F

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import (
    check_counts,
    check_scale,
    quantise_masked_reference,
    quantise_reference,
)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, as all of these do."""
    _check_halves(x, num_dims=2)
    if path_of("silu_mul", x.device) == "triton" and x.is_contiguous():
        from kernels.elementwise.silu_mul_triton import launch

        return launch(x)
    return silu_mul_reference(x)


def silu_mul_masked(
    x: torch.Tensor, counts: torch.Tensor, *, expected_rows: int = 0
) -> torch.Tensor:
    """[E, C, I] of the first `counts[e]` rows of each expert, of which there are likely to be
    `expected_rows` (0: unknown)."""
    _check_halves(x, num_dims=3)
    check_counts(x, counts)
    if path_of("silu_mul", x.device) == "triton" and x.is_contiguous():
        from kernels.elementwise.silu_mul_triton import launch_masked

        return launch_masked(x, counts, expected_rows)
    return silu_mul_masked_reference(x, counts)


def silu_mul_quantise(
    x: torch.Tensor,
    owner: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale), which mean nothing for rows whose `owner` [T] int32 is negative. Raises
    ValueError unless I is a multiple of 128."""
    _check(x, num_dims=2)
    check_scale(x, scale)
    if owner is not None and (owner.shape != x.shape[:1] or not owner.is_contiguous()):
        raise ValueError(f"owner {tuple(owner.shape)} does not fit {tuple(x.shape)}")
    if owner is not None:
        check_operand("owner", owner, x.device, torch.int32)
    if path_of("silu_mul", x.device) == "triton":
        from kernels.elementwise.silu_mul_triton import launch_quantise

        return launch_quantise(x, scale=scale, owner=owner)
    return silu_mul_quantise_reference(x, scale=scale)


def silu_mul_quantise_masked(
    x: torch.Tensor,
    counts: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale) of the first `counts[e]` rows of each expert, `expected_rows` as above."""
    _check(x, num_dims=3)
    check_counts(x, counts)
    check_scale(x, scale)
    if path_of("silu_mul", x.device) == "triton":
        from kernels.elementwise.silu_mul_triton import launch_quantise

        return launch_quantise(x, counts, scale=scale, expected_rows=expected_rows)
    return silu_mul_quantise_masked_reference(x, counts, scale=scale)


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_masked_reference(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], x.shape[2] // 2)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = silu_mul_reference(x[expert, :count])
    return out


def silu_mul_quantise_reference(
    x: torch.Tensor, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_reference(silu_mul_reference(x.float()), scale=scale)


def silu_mul_quantise_masked_reference(
    x: torch.Tensor, counts: torch.Tensor, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_masked_reference(silu_mul_reference(x.float()), counts, scale=scale)


def _check(x: torch.Tensor, *, num_dims: int) -> None:
    if x.dim() != num_dims or not x.is_contiguous():
        raise ValueError(f"x must be contiguous with {num_dims} dimensions, is {tuple(x.shape)}")
    if x.shape[-1] % (2 * GROUP):
        raise ValueError(f"I = {x.shape[-1] / 2:g} is not a multiple of {GROUP}")
    check_operand("x", x, x.device, *FLOATS)


def _check_halves(x: torch.Tensor, *, num_dims: int) -> None:
    if x.dim() != num_dims or x.shape[-1] % 2:
        raise ValueError(f"x must have {num_dims} dimensions, two halves, is {tuple(x.shape)}")
    check_operand("x", x, x.device, *FLOATS)
