"""Triton paths of `rms_norm`: a program a row, which stays in registers. What is added may
be what `kernels.elementwise.combine` would combine.
"""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow
from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.elementwise.combine import Combination, Update
from kernels.elementwise.quantise_triton import quantise_by, quantise_group

FEW_ROWS = 256
# Up to so many, one for each multiprocessor, all choices of a row are loaded together; of more only
# two, which leaves registers for more programs. 4,096 rows take 163 us, with four at once 180, with
# eight 224, and 200 when a kernel before combines them; 256 take 8.5, 8.9, 11.9 and 12.2.
FEW_COMBINED = 128
AT_ONCE = 2
# Of fewer a program a row takes longer than a launch more, whose programs share rows: 6.7 us of one
# row in a model, 4.9 in two launches.
MIN_COMBINED = 17


@triton.jit
def _combined(
    base, rows, row_of, weights, token, columns, inside, width, num_tokens, weights_stride,
    num_choices: tl.constexpr, at_once: tl.constexpr, has_base: tl.constexpr,
):  # fmt: skip
    """As `kernels.elementwise.combine`, rounded."""
    total = tl.zeros(columns.shape, tl.float32)
    for first in tl.range(0, num_choices, at_once):
        # Unrolled, so that their loads are in flight together.
        for index in tl.static_range(at_once):
            choice = first + index
            place = row_of + choice * num_tokens + token
            row = tl.load(place, mask=choice < num_choices, other=-1).to(tl.int64)
            factor = tl.load(weights + token * weights_stride + choice, mask=row >= 0, other=0.0)
            here = inside & (row + tl.zeros_like(columns) >= 0)
            values = tl.load(rows + row * width + columns, mask=here, other=0.0)
            total += values.to(tl.float32) * factor
    if has_base:
        total += tl.load(base + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    return total.to(rows.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows", "scale_group_stride"])
def _rms_norm(
    x, rows, row_of, weights, residual, weight, total, out, small, scale, given, given_scale,
    num_rows, width, x_stride,
    residual_stride, weights_stride, scale_group_stride, eps, num_choices: tl.constexpr,
    at_once: tl.constexpr, has_base: tl.constexpr,
    group: tl.constexpr, groups: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    has_residual: tl.constexpr, plain: tl.constexpr, quantised: tl.constexpr,
    has_given: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """`num_choices`: x is the base of a combination of so many rows, if there is one."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, groups)
    columns = index[:, None] * group + tl.arange(0, group)[None, :]
    inside = columns < width
    # Weights are there already.
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if has_given:
        one_scale = tl.load(given_scale)
    follow(dependent)
    if num_choices:
        values = _combined(
            x, rows, row_of, weights, row, columns, inside, width, num_rows, weights_stride,
            num_choices, at_once, has_base,
        )  # fmt: skip
    else:
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if has_residual:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * width + columns, values, mask=inside)
    wide = values.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / width
    normed = wide * (1.0 / tl.sqrt_rn((mean + eps).to(tl.float32))) * factors
    if plain:
        tl.store(out + row * width + columns, normed.to(values.dtype), mask=inside)
    if quantised:
        rounded, scales = quantise_group(normed, largest, smallest)
        tl.store(small + row * width + columns, rounded, mask=inside)
        tl.store(scale + index * scale_group_stride + row, scales, mask=index * group < width)
    if has_given:
        tl.store(
            given + row * width + columns, quantise_by(normed, one_scale, largest), mask=inside
        )


def launch(
    x: Update,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    plain: bool = True,
    quantises: bool = False,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """As `kernels.elementwise.rms_norm.rms_norms`; a combination needs a residual."""
    shaped = residual if isinstance(x, Combination) else x
    assert shaped is not None
    num_rows, width = shaped.shape
    total = shaped if residual is None else shaped.new_empty(shaped.shape)
    out = shaped.new_empty(shaped.shape) if plain else None
    values = scales = given = None
    if quantises:
        values = shaped.new_empty(shaped.shape, dtype=torch.float8_e4m3fn)
        scales = empty_scales(shaped)
    if scale is not None:
        given = shaped.new_empty(shaped.shape, dtype=torch.float8_e4m3fn)
    if not num_rows:
        return out, values, scales, given, total
    if isinstance(x, Combination) and num_rows < MIN_COMBINED:
        x = x.combined()
    parts = x if isinstance(x, Combination) else None
    base = x.base if isinstance(x, Combination) else x
    if parts is not None:
        assert parts.rows.is_contiguous()
        assert parts.row_of.is_contiguous()
        assert parts.weights.stride(1) == 1
        assert base is None or base.is_contiguous()
    groups, is_dependent = triton.next_power_of_2(triton.cdiv(width, GROUP)), dependent(shaped)
    num_choices = 0 if parts is None else len(parts.row_of)
    num_warps = _num_warps(num_rows, groups, num_choices > 0, plain and quantises)
    _rms_norm[(num_rows,)](
        base, *((None, None, None) if parts is None else (parts.rows, parts.row_of, parts.weights)),
        residual, weight, total, out, values, scales, given, scale, num_rows, width,
        0 if base is None else base.stride(0), 0 if residual is None else residual.stride(0),
        0 if parts is None else parts.weights.stride(0), 0 if scales is None else scales.stride(1),
        eps, num_choices=num_choices, at_once=num_choices if num_rows <= FEW_COMBINED else AT_ONCE,
        has_base=base is not None, group=GROUP, groups=groups, largest=LARGEST, smallest=SMALLEST,
        has_residual=residual is not None, plain=plain, quantised=quantises,
        has_given=given is not None, dependent=is_dependent, num_warps=num_warps,
        launch_pdl=is_dependent,
    )  # fmt: skip
    return out, values, scales, given, total


def _num_warps(num_rows: int, groups: int, combines: bool, has_both: bool) -> int:
    """Of few rows the longest load counts, of many how many rows are under way."""
    if groups < 32:
        return 4
    if num_rows <= FEW_ROWS or combines:
        return 16
    return 4 if has_both else 8
