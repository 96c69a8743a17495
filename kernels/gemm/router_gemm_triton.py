"""Triton path of `router_gemm`: blocks of tokens and experts by the matrix instruction, or
for very few tokens a program a pair of experts, whose weights it loads all at once."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow

MAX_BLOCKS = 4096  # of outputs; each has a counter
FEW_ROWS = 4
# Of a program for few rows. 128 programs for 256 experts are a little faster than 256 of more
# warps, until the rows are in each other's way.
ONE_OR_TWO_ROWS = (2, 8)  # experts, warps
MORE_ROWS = (1, 16)


@dataclass(frozen=True, slots=True)
class RouterTritonShape:
    """Of a program's block; as many splits of K as make about `programs` of them."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    programs: int = 128


def shape_for(num_rows: int) -> RouterTritonShape:
    if num_rows <= 256:
        return RouterTritonShape(min(64, max(16, triton.next_power_of_2(num_rows))), 16, 128, 4)
    # Wide blocks read tokens twice instead of once for every 16 experts.
    return RouterTritonShape(128, 128, 64, 8)


@triton.jit(do_not_specialize=["num_rows"])
def _router_gemm(
    hidden, weight, out, part, counters, num_rows, n, k, k_per_split,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, splits: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    total = tl.zeros([block_m, block_n], tl.float32)
    for first in range(split * k_per_split, tl.minimum((split + 1) * k_per_split, k), block_k):
        index = first + tl.arange(0, block_k)
        x = tl.load(
            hidden + row[:, None] * k + index[None, :],
            mask=(row < num_rows)[:, None] & (index < k)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight + column[:, None] * k + index[None, :],
            mask=(column < n)[:, None] & (index < k)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(x, tl.trans(w), input_precision="ieee")
    place = row[:, None] * n + column[None, :]
    if splits == 1:
        tl.store(out + place, total, mask=inside)
    else:
        tl.store(part + split * num_rows * n + place, total, mask=inside)
        # All threads' stores come before the count that tells of them.
        tl.debug_barrier()
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros([block_m, block_n], tl.float32)
            for other in tl.static_range(splits):
                goal = part + other * num_rows * n + place
                # Past the first-level cache: other multiprocessors wrote it.
                total += tl.load(goal, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + place, total, mask=inside)
            tl.store(counter, 0)  # for the next launch


@triton.jit
def _router_gemv(
    hidden, weight, out, n, k, num_rows: tl.constexpr, columns: tl.constexpr,
    padded: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    if dependent:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    index = tl.arange(0, padded)
    is_index = index < k
    w = tl.load(
        weight + column[:, None] * k + index[None, :],
        mask=(column < n)[:, None] & is_index[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    # Weights are there already; what the kernel before writes may not be.
    if dependent:
        tl.extra.cuda.gdc_wait()
    # Unrolled: the rows' loads and sums overlap.
    for row in tl.static_range(num_rows):
        x = tl.load(hidden + row * k + index, mask=is_index, other=0.0).to(tl.float32)
        tl.store(out + row * n + column, tl.sum(w * x[None, :], axis=1), mask=column < n)


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros between two launches; launches on one stream follow each other."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def launch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    few_rows: int = FEW_ROWS,
    shape: RouterTritonShape | None = None,
) -> torch.Tensor:
    """Up to `few_rows` tokens are too few for the matrix instruction. `shape`: another one than
    that of the number of rows, to measure it."""
    num_rows, k = hidden.shape
    is_dependent = dependent(hidden)
    n = weight.shape[0]
    out = hidden.new_empty(num_rows, n, dtype=torch.float32)
    if not num_rows:
        return out
    if num_rows <= few_rows:
        columns, num_warps = ONE_OR_TWO_ROWS if num_rows <= 2 else MORE_ROWS
        _router_gemv[(triton.cdiv(n, columns),)](
            hidden.contiguous(), weight.contiguous(), out, n, k, num_rows=num_rows,
            columns=columns, padded=triton.next_power_of_2(k),
            dependent=is_dependent, num_warps=num_warps, launch_pdl=is_dependent,
        )  # fmt: skip
        return out
    shape = shape or shape_for(num_rows)
    blocks = (triton.cdiv(n, shape.block_n), triton.cdiv(num_rows, shape.block_m))
    wanted = max(1, shape.programs // (blocks[0] * blocks[1]))
    k_per_split = triton.cdiv(triton.cdiv(k, min(16, wanted)), shape.block_k) * shape.block_k
    splits = triton.cdiv(k, k_per_split)
    assert blocks[0] * blocks[1] <= MAX_BLOCKS or splits == 1
    part = hidden.new_empty(splits if splits > 1 else 0, num_rows, n, dtype=torch.float32)
    _router_gemm[(*blocks, splits)](
        hidden.contiguous(), weight.contiguous(), out, part, _counters(hidden.device), num_rows, n,
        k, k_per_split, block_m=shape.block_m, block_n=shape.block_n, block_k=shape.block_k,
        splits=splits, dependent=is_dependent, num_warps=shape.num_warps, num_stages=4,
        launch_pdl=is_dependent,
    )  # fmt: skip
    return out
