"""Triton path of `quantise`: a program a block of groups of one row or a few."""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow
from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST, empty_scales

GROUPS = 8  # 1,024 values a program: two 16-byte loads for each of 128 threads
FEW_ROWS = (16, 1)  # groups and rows of a program
# The scales of its rows lie side by side.
MANY_ROWS = (2, 8)
MASKED_PROGRAMS = 512  # of one expert and block of groups at most: they share its rows
FEW_PROGRAMS = 8


@triton.jit
def quantise_group(values, largest: tl.constexpr, smallest: tl.constexpr):
    """(e4m3 values, scales) of float32 `values` [GROUPS, 128]."""
    peak = tl.maximum(tl.max(tl.abs(values), axis=1), smallest)
    # Correctly rounded divisions, so that the bits are those of the reference.
    out = values * tl.div_rn(largest, peak)[:, None]
    return out.to(tl.float8e4nv), tl.div_rn(peak, largest)


@triton.jit
def quantise_by(values, scale, largest: tl.constexpr):
    """e4m3 of float32 `values` over one `scale` that is given."""
    scaled = values * tl.div_rn(1.0, scale)
    return tl.minimum(tl.maximum(scaled, -largest), largest).to(tl.float8e4nv)


@triton.jit
def silu(values):
    return values / (1.0 + tl.exp(-values))


@triton.jit
def _quantise_rows(
    x, out, scale, expert, row, index, capacity, num_rows, width, x_stride, scale_expert_stride,
    scale_group_stride, largest: tl.constexpr, smallest: tl.constexpr, group: tl.constexpr,
    gated: tl.constexpr, given: tl.constexpr,
):  # fmt: skip
    """Groups `index` [N] of rows `row` [N], those below `num_rows`. `given`: `scale` is one
    for all and is there."""
    columns = index[:, None] * group + tl.arange(0, group)[None, :]
    is_group = (index * group < width) & (row < num_rows)
    line = expert * capacity + row
    source = x + (line * x_stride)[:, None] + columns
    if gated:
        gate = tl.load(source, mask=is_group[:, None], other=0.0)
        up = tl.load(source + width, mask=is_group[:, None], other=0.0)
        values = silu(gate.to(tl.float32)) * up.to(tl.float32)
    else:
        values = tl.load(source, mask=is_group[:, None], other=0.0).to(tl.float32)
    to = out + (line * width)[:, None] + columns
    if given:
        quantised = quantise_by(values, tl.load(scale), largest)
    else:
        quantised, scales = quantise_group(values, largest, smallest)
        place = expert * scale_expert_stride + index * scale_group_stride + row
        tl.store(scale + place, scales, mask=is_group)
    tl.store(to, quantised, mask=is_group[:, None])


@triton.jit(do_not_specialize=["capacity", "scale_expert_stride", "scale_group_stride"])
def _quantise(
    x, out, scale, counts, owner, capacity, width, x_stride, scale_expert_stride,
    scale_group_stride,
    largest: tl.constexpr, smallest: tl.constexpr, group: tl.constexpr, groups: tl.constexpr,
    rows: tl.constexpr, masked: tl.constexpr, owned: tl.constexpr, gated: tl.constexpr,
    given: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """`gated`: of silu(x[:width]) * x[width:] of each row, which is twice as long. `owned`: rows
    whose `owner` is negative are left alone."""
    follow(dependent)
    expert = tl.program_id(2).to(tl.int64)
    number = tl.arange(0, rows * groups)
    index = tl.program_id(1) * groups + number // rows
    if masked:
        count = tl.load(counts + expert)
        for first in range(tl.program_id(0) * rows, count, tl.num_programs(0) * rows):
            _quantise_rows(
                x, out, scale, expert, first + number % rows, index, capacity, count, width,
                x_stride, scale_expert_stride, scale_group_stride, largest, smallest, group, gated,
                given,
            )  # fmt: skip
    else:
        row = tl.program_id(0) * rows + number % rows
        if owned:
            owner_of_row = tl.load(owner + row, mask=row < capacity, other=-1)
            row = tl.where(owner_of_row >= 0, row, capacity)
        _quantise_rows(
            x, out, scale, expert, row, index, capacity, capacity, width, x_stride,
            scale_expert_stride, scale_group_stride, largest, smallest, group, gated, given,
        )  # fmt: skip


def launch(
    x: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    groups: int = 0,
    rows: int = 0,
    expected_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run`. `groups`, `rows`, to measure them: of a program."""
    is_many = counts is None and x.shape[-2] >= MANY_ROWS[1]
    usual = MANY_ROWS if is_many else FEW_ROWS
    return run(
        x, counts, gated=False, scale=scale, groups=groups or usual[0], rows=rows or usual[1],
        num_warps=2 if is_many and x.shape[-2] >= 512 else 4, expected_rows=expected_rows,
    )  # fmt: skip


def row_programs(capacity: int, expected_rows: int) -> int:
    """How many programs share the rows of an expert: twice as many as it is likely to have, since
    launching those that find none takes time, too. 0: unknown."""
    likely = max(FEW_PROGRAMS, 2 * expected_rows) if expected_rows else MASKED_PROGRAMS
    return min(capacity, likely, MASKED_PROGRAMS)


def run(
    x: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    gated: bool,
    groups: int,
    rows: int,
    num_warps: int,
    scale: torch.Tensor | None = None,
    expected_rows: int = 0,
    owner: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scales) of x [C, K], rows as far apart as they are, or [E, C, K], contiguous; twice as
    wide when `gated`. `counts` [E] of rows that are in use, E = 1 for x [C, K], or all of them;
    those whose `owner` [C] is negative are left alone, if there are owners and no counts. `scale`:
    one for all; it comes back. `expected_rows` of an expert: as `row_programs` has them."""
    *lead, capacity, width = x.shape
    width //= 1 + gated
    out = x.new_empty(*lead, capacity, width, dtype=torch.float8_e4m3fn)
    scales = empty_scales(out) if scale is None else scale
    if not out.numel():
        return out, scales
    if counts is None:
        num_programs = triton.cdiv(capacity, rows)
    else:
        num_programs = row_programs(capacity, expected_rows)
    strides = (0, 0) if scale is not None else (scales.stride(0) if lead else 0, scales.stride(-1))
    is_dependent = dependent(x)
    _quantise[num_programs, triton.cdiv(width, groups * GROUP), lead[0] if lead else 1](
        x, out, scales, counts, owner, capacity, width, x.stride(-2), *strides,
        largest=LARGEST, smallest=SMALLEST, group=GROUP, groups=groups, rows=rows,
        masked=counts is not None, owned=owner is not None, gated=gated,
        given=scale is not None, dependent=is_dependent, num_warps=num_warps,
        launch_pdl=is_dependent,
    )  # fmt: skip
    return out, scales
