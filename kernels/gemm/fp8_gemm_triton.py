"""Triton path of `fp8_gemm` and `fp8_grouped_gemm`: one kernel for the dense, the masked and the
contiguous layout, cut as `kernels.gemm.fp8_gemm_choice` says, and for that of
`kernels.moe.fused_moe_triton`: contiguous, aligned to a block, as many rows as the device knows.

Few tokens: time goes with the bytes of the weights. They are the first operand of the matrix
instruction, whose 64 rows they always fill, and the tokens its second; where there would be too few
programs, several share a long sum, and a second kernel adds their parts in order.

Many tokens: time goes with what the second-level cache delivers. A program has 128 tokens and 256
rows of weights in two halves, whose partial products follow each other through the same registers.

Tiles come by descriptors (TMA) where the device has them: one thread asks for a whole one.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.build.aligned_rows import ALIGNMENT
from kernels.build.dependent_launch_triton import dependent, follow
from kernels.build.fp8_gemm_blocks import (
    ALIGNED,
    CONTIGUOUS,
    DENSE,
    MASKED,
    MAX_STAGES_BYTES,
    MULTIPROCESSORS,
    Fp8Blocks,
)
from kernels.build.fp8_scales import Fp8Operands
from kernels.gemm.fp8_gemm_choice import fp8_blocks

GROUP = tl.constexpr(128)  # one scale of the weights for as many rows and columns
BLOCK_K = 128
# Arguments whose divisibility or being 1 makes no kernel faster: one is compiled for all.
SIZES = [
    "num_rows",
    "num_experts",
    "groups_per_split",
    "num_blocks_m",
    "x_scale_expert_stride",
    "x_scale_group_stride",
]
ROW_BLOCKS = 8  # of neighbouring programs: they share weights in the second-level cache
JOINED = 1024  # outputs of a program that adds parts


@triton.jit
def _tile(
    source, first_row, last_row, first, width,
    rows: tl.constexpr, columns: tl.constexpr, described: tl.constexpr,
):  # fmt: skip
    """[rows, columns] of a matrix with rows of `width`; `source` is its descriptor or pointer."""
    if described:
        tile = source.load([first_row, first])
    else:
        row = first_row + tl.arange(0, rows)
        place = (
            source + row.to(tl.int64)[:, None] * width + (first + tl.arange(0, columns))[None, :]
        )
        tile = tl.load(place, mask=(row < last_row)[:, None], other=0.0)
    return tile


@triton.jit
def _product(
    x, x_scale, weight, w_scale, out, batch, expert, first_row, last_row, first_column, split,
    num_rows, n, k, x_scale_expert_stride, x_scale_row_stride, x_scale_group_stride,
    groups_per_split,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, halves: tl.constexpr,
    swapped: tl.constexpr, described: tl.constexpr, pinned: tl.constexpr,
):  # fmt: skip
    """Rows `first_row` to `last_row`, at most block_m of them, of one batch and its expert."""
    row = first_row + tl.arange(0, block_m)
    is_row = row < last_row
    num_groups = k // block_k
    x_row, w_row = batch * num_rows + first_row, expert * n + first_column
    x_end, w_end = batch * num_rows + last_row, expert * n + n
    x_scale_place = x_scale + batch.to(tl.int64) * x_scale_expert_stride + row * x_scale_row_stride
    line = expert.to(tl.int64) * tl.cdiv(n, GROUP) + first_column // GROUP
    w_scale_place = w_scale + line * num_groups
    has_second = first_column + block_n < n

    # NOTE: two names, because a program has no list of tensors.
    total = tl.zeros([block_n, block_m] if swapped else [block_m, block_n], tl.float32)
    second = total
    first_group = split * groups_per_split
    last_group = tl.minimum(first_group + groups_per_split, num_groups)
    # Scales are fetched one step ahead: they are needed as soon as a product is there.
    x_next = tl.load(x_scale_place + first_group * x_scale_group_stride, mask=is_row, other=0.0)
    w_next = tl.load(w_scale_place + first_group)
    second_next = w_next
    if halves == 2:
        place = w_scale_place + num_groups + first_group
        second_next = tl.load(place, mask=has_second, other=0.0)
    for group in range(first_group, last_group):
        x_factor, w_factor, second_factor = x_next, w_next, second_next
        following = tl.minimum(group + 1, last_group - 1)
        x_next = tl.load(x_scale_place + following * x_scale_group_stride, mask=is_row, other=0.0)
        w_next = tl.load(w_scale_place + following)
        factor = x_factor * w_factor
        first = group * block_k
        x_tile = _tile(x, x_row, x_end, first, k, block_m, block_k, described)
        w_tile = _tile(weight, w_row, w_end, first, k, block_n, block_k, described)
        if swapped:
            total += tl.dot(w_tile, tl.trans(x_tile)) * factor[None, :]
        else:
            total += tl.dot(x_tile, tl.trans(w_tile)) * factor[:, None]
        if halves == 2:
            if pinned:
                # Else the compiler moves these sums after the next product, and both products'
                # parts do not fit into the registers together.
                total = tl.inline_asm_elementwise(
                    "", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1
                )
            place = w_scale_place + num_groups + following
            second_next = tl.load(place, mask=has_second, other=0.0)
            w_tile = _tile(weight, w_row + block_n, w_end, first, k, block_n, block_k, described)
            second += tl.dot(x_tile, tl.trans(w_tile)) * (x_factor * second_factor)[:, None]
    if swapped:
        total = tl.trans(total)
    column = first_column + tl.arange(0, block_n)
    start = (split * num_rows + batch * num_rows + row).to(tl.int64) * n
    place = out + start[:, None] + column[None, :]
    inside = is_row[:, None] & (column < n)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    if halves == 2:
        inside = is_row[:, None] & (column + block_n < n)[None, :]
        tl.store(place + block_n, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _corner(
    number, num_blocks_m, num_blocks_n, block_m: tl.constexpr, columns: tl.constexpr,
    row_blocks: tl.constexpr,
):  # fmt: skip
    """First row and column of a block: neighbours share weights."""
    wide = row_blocks * num_blocks_n
    first_block = number // wide * row_blocks
    height = tl.minimum(num_blocks_m - first_block, row_blocks)
    within = number % wide
    return (first_block + within % height) * block_m, within // height * columns


class _Specialised(Protocol):
    constants: Mapping[str, object]


def _name_of(specialised: _Specialised) -> str:
    """By which a profiler tells experts' products from dense ones."""
    return "_fp8_gemm" if specialised.constants["layout"] == DENSE else "_fp8_grouped_gemm"


@triton.jit(do_not_specialize=SIZES, repr=_name_of)
def _fp8_gemm(
    x, x_scale, weight, w_scale, out, counts, num_used, num_rows, num_experts, n, k,
    x_scale_expert_stride, x_scale_row_stride, x_scale_group_stride, groups_per_split,
    num_blocks_m,
    layout: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    halves: tl.constexpr, swapped: tl.constexpr, row_blocks: tl.constexpr,
    described: tl.constexpr, pinned: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    num_blocks_n = tl.cdiv(n, halves * block_n)
    batch = tl.program_id(1)  # 0 unless masked
    split = tl.program_id(2)
    if layout == 3:
        # As many programs as run at once share the blocks that are in use.
        num_blocks_m = tl.load(num_used) // block_m
        for number in range(tl.program_id(0), num_blocks_m * num_blocks_n, tl.num_programs(0)):
            first_row, first_column = _corner(
                number, num_blocks_m, num_blocks_n, block_m, halves * block_n, row_blocks
            )
            expert = tl.load(counts + first_row // block_m)
            _product(
                x, x_scale, weight, w_scale, out, batch, expert, first_row, num_rows,
                first_column, split, num_rows, n, k, x_scale_expert_stride, x_scale_row_stride,
                x_scale_group_stride, groups_per_split, block_m, block_n, block_k, halves,
                swapped, described, pinned,
            )  # fmt: skip
    else:
        first_row, first_column = _corner(
            tl.program_id(0), num_blocks_m, num_blocks_n, block_m, halves * block_n, row_blocks
        )
        if layout == 1:
            # Programs for as many rows as are likely; where there are more, each goes on.
            last_row = tl.load(counts + batch)
            for start in range(first_row, last_row, num_blocks_m * block_m):
                _product(
                    x, x_scale, weight, w_scale, out, batch, batch, start, last_row,
                    first_column, split, num_rows, n, k, x_scale_expert_stride,
                    x_scale_row_stride, x_scale_group_stride, groups_per_split, block_m,
                    block_n, block_k, halves, swapped, described, pinned,
                )  # fmt: skip
        else:
            expert = batch
            if layout == 2:
                expert = tl.load(counts + first_row)
                expert = tl.where(expert < num_experts, expert, -1)  # others have no weights
            if expert >= 0:
                _product(
                    x, x_scale, weight, w_scale, out, batch, expert, first_row, num_rows,
                    first_column, split, num_rows, n, k, x_scale_expert_stride,
                    x_scale_row_stride, x_scale_group_stride, groups_per_split, block_m,
                    block_n, block_k, halves, swapped, described, pinned,
                )  # fmt: skip


@triton.jit
def _add_splits(
    part, out, num, splits: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr
):  # fmt: skip
    follow(dependent)
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(part + split * num + place, mask=place < num, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < num)


def dense(operands: Fp8Operands, *, blocks: Fp8Blocks | None = None) -> torch.Tensor:
    """`blocks`: other than those of the table, to measure them."""
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    _run((x[None], x_scale[None], weight[None], w_scale), out, None, DENSE, x.shape[0], blocks)
    return out


def masked(
    operands: Fp8Operands,
    counts: torch.Tensor,
    expected_rows: int,
    *,
    blocks: Fp8Blocks | None = None,
) -> torch.Tensor:
    x, _, weight, _ = operands
    out = x.new_empty(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    _run(operands, out, counts, MASKED, expected_rows, blocks)
    return out


def contiguous(
    operands: Fp8Operands, expert_of: torch.Tensor, *, blocks: Fp8Blocks | None = None
) -> torch.Tensor:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    rows = min(ALIGNMENT, x.shape[0])
    _run((x[None], x_scale[None], weight, w_scale), out, expert_of, CONTIGUOUS, rows, blocks)
    return out


def aligned(
    operands: Fp8Operands,
    expert_of: torch.Tensor,
    num_used: torch.Tensor,
    blocks: Fp8Blocks,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [M, K], of which the first `num_used` [1] int32 rows, a multiple of block_m, are in use;
    expert_of [M / block_m] int32 of each block -> [M, N] `dtype`."""
    x, x_scale, weight, w_scale = operands
    assert len(expert_of) * blocks.block_m == x.shape[0]
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=dtype)
    given = x[None], x_scale[None], weight, w_scale
    _run(given, out, expert_of, ALIGNED, x.shape[0], blocks, num_used)
    return out


def has_descriptors(*tensors: torch.Tensor) -> bool:
    """Whether tiles of these can come by TMA. Tensors without memory are compiled for Hopper."""
    device = tensors[0].device
    is_hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
    return is_hopper and all(each.data_ptr() % 16 == 0 for each in tensors)


def _run(
    operands: Fp8Operands,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    layout: int,
    expected_rows: int,
    blocks: Fp8Blocks | None,
    num_used: torch.Tensor | None = None,
) -> None:
    """x [batches, rows, K]: one batch unless masked."""
    x, x_scale, weight, w_scale = operands
    num_batches, num_rows, k = x.shape
    num_experts, n, _ = weight.shape
    if not out.numel():
        return
    blocks = blocks or fp8_blocks(x.device, layout, expected_rows, n, k)
    assert blocks.splits == 1 or layout == DENSE, blocks
    num_groups = k // BLOCK_K
    groups_per_split = triton.cdiv(num_groups, blocks.splits)
    splits = triton.cdiv(num_groups, groups_per_split)
    part = out
    if splits > 1:
        part = out.new_empty(splits, num_rows, n, dtype=torch.float32)
    described, is_dependent = has_descriptors(x, weight), dependent(x)
    if described:
        x = TensorDescriptor.from_tensor(x.view(-1, k), [blocks.block_m, BLOCK_K])
        weight = TensorDescriptor.from_tensor(weight.view(-1, k), [blocks.block_n, BLOCK_K])
    num_blocks_n = triton.cdiv(n, blocks.halves * blocks.block_n)
    # Programs without rows cost little, those with the rows of two are what others wait for.
    height = min(num_rows, max(1, 2 * expected_rows)) if layout == MASKED else num_rows
    num_blocks_m = triton.cdiv(height, blocks.block_m)
    num_programs = num_blocks_n * num_blocks_m
    if layout == ALIGNED:
        num_programs = min(num_programs, _programs_at_once(out.device, blocks))
    grid = (num_programs, num_batches, splits)
    _fp8_gemm[grid](
        x, x_scale, weight, w_scale.contiguous(), part, counts, num_used, num_rows,
        num_experts if layout == CONTIGUOUS else None, n, k, *x_scale.stride(),
        groups_per_split, num_blocks_m, layout=layout, block_m=blocks.block_m,
        block_n=blocks.block_n, block_k=BLOCK_K, halves=blocks.halves, swapped=blocks.swapped,
        row_blocks=ROW_BLOCKS, described=described, pinned=not triton.knobs.runtime.interpret,
        dependent=is_dependent, launch_pdl=is_dependent, num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )  # fmt: skip
    if splits > 1:
        num = out.numel()
        _add_splits[(triton.cdiv(num, JOINED),)](
            part, out, num, splits=splits, block=JOINED, dependent=is_dependent, num_warps=4,
            launch_pdl=is_dependent,
        )  # fmt: skip


def _programs_at_once(device: torch.device, blocks: Fp8Blocks) -> int:
    """By shared memory; 8 warps have the registers of a multiprocessor to themselves."""
    room = MAX_STAGES_BYTES // (blocks.stage_bytes * blocks.num_stages)
    per_multiprocessor = 1 if blocks.num_warps == 8 else max(1, min(room, 4))
    return per_multiprocessor * (MULTIPROCESSORS if device.type != "cpu" else 1)
