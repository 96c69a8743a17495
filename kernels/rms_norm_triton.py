"""Triton paths of `kernels.rms_norm`: a program a row, which stays in registers."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch_triton import dependent, follow
from kernels.quantise import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.quantise_triton import quantise_group


@triton.jit
def _rms_norm(
    x, residual, weight, total, out, small, scale, width, x_stride, residual_stride,
    scale_group_stride, eps,
    group: tl.constexpr, groups: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    has_residual: tl.constexpr, plain: tl.constexpr, quantised: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, groups)
    columns = index[:, None] * group + tl.arange(0, group)[None, :]
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if has_residual:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * width + columns, values, mask=inside)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / width
    normed = wide * (1.0 / tl.sqrt_rn((mean + eps).to(tl.float32))) * factors
    if plain:
        tl.store(out + row * width + columns, normed.to(values.dtype), mask=inside)
    if quantised:
        rounded, scales = quantise_group(normed, largest, smallest)
        tl.store(small + row * width + columns, rounded, mask=inside)
        tl.store(scale + index * scale_group_stride + row, scales, mask=index * group < width)


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    num_warps: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, sum); the sum is x itself without a residual."""
    out = x.new_empty(x.shape)
    return out, _run(x, residual, weight, eps, out, None, num_warps)


def launch_quantise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    num_warps: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, scale, sum)."""
    small = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), empty_scales(x)
    return *small, _run(x, residual, weight, eps, None, small, num_warps)


def launch_both(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    num_warps: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, quantised out, scale, sum)."""
    out = x.new_empty(x.shape)
    small = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), empty_scales(x)
    return out, *small, _run(x, residual, weight, eps, out, small, num_warps)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    small: tuple[torch.Tensor, torch.Tensor] | None,
    num_warps: int,
) -> torch.Tensor:
    """The sum; the norm goes to `out` and, with its scales, to `small`."""
    num_rows, width = x.shape
    total = x if residual is None else x.new_empty(x.shape)
    if not num_rows:
        return total
    groups, is_dependent = triton.next_power_of_2(triton.cdiv(width, GROUP)), dependent(x)
    values, scale = small or (None, None)
    _rms_norm[(num_rows,)](
        x, residual, weight, total, out, values, scale, width, x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if scale is None else scale.stride(1), eps,
        group=GROUP, groups=groups, largest=LARGEST, smallest=SMALLEST,
        has_residual=residual is not None, plain=out is not None, quantised=small is not None,
        dependent=is_dependent, launch_pdl=is_dependent,
        # Of few rows the longest load counts, of many how many rows are under way.
        num_warps=num_warps or (4 if groups < 32 else 16 if num_rows <= 256 else 8),
    )  # fmt: skip
    return total
