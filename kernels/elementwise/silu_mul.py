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
from kernels.build.operands import FLOATS, check_contiguous, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import check, check_counts, check_scale, quantise_reference


def silu_mul(
    x: torch.Tensor, counts: torch.Tensor | None = None, *, expected_rows: int = 0
) -> torch.Tensor:
    """Masked with `counts`, of whom an expert is likely to have `expected_rows` (0: unknown).
    Raises ValueError for arguments that do not fit, as the other does."""
    if x.dim() != (2 if counts is None else 3) or x.shape[-1] % 2:
        raise ValueError(f"x must be rows of two halves, is {tuple(x.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    if counts is not None:
        check_counts(x, counts)
    if path_of("silu_mul", x.device) == "triton" and x.is_contiguous():
        from kernels.elementwise.silu_mul_triton import launch

        return launch(x, counts, expected_rows=expected_rows)
    return silu_mul_reference(x, counts)


def silu_mul_quantise(
    x: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    owner: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale), which mean nothing for rows whose `owner` [T] int32 is negative, where there
    are no counts; these and `expected_rows` as above. ValueError unless I is a multiple of 128."""
    check(x, num_dims=2 if counts is None else 3, multiple=2 * GROUP)
    check_contiguous(x=x)
    check_scale(x, scale)
    if counts is not None:
        check_counts(x, counts)
    if owner is not None:
        check_operand("owner", owner, x.device, torch.int32, shape=x.shape[:1])
        check_contiguous(owner=owner)
    if path_of("silu_mul", x.device) == "triton":
        from kernels.elementwise.silu_mul_triton import launch_quantise

        return launch_quantise(x, counts, scale=scale, owner=owner, expected_rows=expected_rows)
    return silu_mul_quantise_reference(x, counts, scale=scale)


def silu_mul_reference(x: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    if counts is None:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = x.new_empty(*x.shape[:2], x.shape[2] // 2)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = silu_mul_reference(x[expert, :count])
    return out


def silu_mul_quantise_reference(
    x: torch.Tensor, counts: torch.Tensor | None = None, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_reference(silu_mul_reference(x.float()), counts, scale=scale)
