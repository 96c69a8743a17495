"""Triton paths of `kernels.elementwise.silu_mul`."""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow
from kernels.elementwise.quantise_triton import GROUPS, row_programs, run, silu

BLOCK = 1024
# Rows from which on programs that quantise have these numbers of groups and rows.
SOME_ROWS, SHAPE_OF_SOME = 64, (4, 4)
MANY_ROWS, SHAPE_OF_MANY = 8192, (16, 1)


@triton.jit
def silu_mul_row(x, out, row, columns, width):
    inside = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * width + columns, mask=inside, other=0.0)
    # Rounded between the two, as the reference does it.
    product = silu(gate).to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(up.dtype), mask=inside)


@triton.jit
def _silu_mul(x, out, width, block: tl.constexpr, dependent: tl.constexpr):
    follow(dependent)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    silu_mul_row(x, out, row, columns, width)


@triton.jit(do_not_specialize=["capacity"])
def _silu_mul_masked(
    x, out, counts, capacity, width, block: tl.constexpr, dependent: tl.constexpr
):  # fmt: skip
    follow(dependent)
    expert = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    for place in range(tl.program_id(0), tl.load(counts + expert), tl.num_programs(0)):
        silu_mul_row(x, out, expert * capacity + place, columns, width)


def launch(
    x: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    expected_rows: int = 0,
) -> torch.Tensor:
    """x [T, 2 I], or [E, C, 2 I] with `counts`, contiguous."""
    *lead, num_rows, double_width = x.shape
    width = double_width // 2
    out = x.new_empty(*lead, num_rows, width)
    is_dependent = dependent(x)
    if not out.numel():
        return out
    if counts is None:
        _silu_mul[num_rows, triton.cdiv(width, 2 * BLOCK)](
            x, out, width, block=2 * BLOCK, dependent=is_dependent, num_warps=8,
            launch_pdl=is_dependent,
        )  # fmt: skip
    else:
        _silu_mul_masked[row_programs(num_rows, expected_rows), triton.cdiv(width, BLOCK), *lead](
            x, out, counts, num_rows, width, block=BLOCK, dependent=is_dependent, num_warps=4,
            launch_pdl=is_dependent,
        )  # fmt: skip
    return out


def launch_quantise(
    x: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    groups: int = 0,
    rows: int = 0,
    expected_rows: int = 0,
    owner: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run`. `groups`, `rows`, to measure them: of a program."""
    usual = (GROUPS, 1)
    if counts is None and x.shape[-2] >= SOME_ROWS:
        usual = SHAPE_OF_SOME if x.shape[-2] < MANY_ROWS else SHAPE_OF_MANY
    return run(
        x, counts, gated=True, scale=scale, groups=groups or usual[0], rows=rows or usual[1],
        num_warps=4, expected_rows=expected_rows, owner=owner,
    )  # fmt: skip
