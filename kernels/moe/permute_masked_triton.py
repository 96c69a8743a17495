"""Triton path of `permute_masked`: programs of a token's choice copy its row to its place.

Where there are few choices each program finds its place by itself and a few more programs count;
else a kernel before it does both, a program an expert.
"""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow
from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST
from kernels.elementwise.quantise_triton import quantise_group
from kernels.moe.masked_rows import MaskedRows, empty_masked

CHUNK = 1024
LARGE_CHUNK = 4096
BLOCK_BYTES = 8192  # of a row, a program that does not quantise
MAX_GROUPS = 64  # of a row, one that does
MAX_FOUND = 2048  # choices, of which each program looks at all before its own


@triton.jit(do_not_specialize=["num_tokens", "capacity"])
def _place(
    topk_idx, row_of, counts, num_tokens, capacity, first, idx_stride,
    num_choices: tl.constexpr, chunk: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    expert = tl.program_id(0)
    seen = tl.zeros([1], tl.int32)
    for begin in range(0, num_tokens * num_choices, chunk):
        entry = begin + tl.arange(0, chunk)
        token, choice = entry // num_choices, entry % num_choices
        is_entry = token < num_tokens
        chosen = tl.load(topk_idx + token * idx_stride + choice, mask=is_entry, other=-1)
        mine = is_entry & (chosen == first + expert)
        place = seen + tl.cumsum(mine.to(tl.int32), 0) - 1
        row = tl.where(place < capacity, expert * capacity + place, -1)
        tl.store(row_of + choice * num_tokens + token, row, mask=mine)
        if expert == 0:  # what no program calls its own
            elsewhere = (chosen < first) | (chosen >= first + tl.num_programs(0))
            nothing = tl.full([chunk], -1, tl.int32)
            goal = row_of + choice * num_tokens + token
            tl.store(goal, nothing, mask=is_entry & elsewhere)
        seen += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert + tl.arange(0, 1), tl.minimum(seen, capacity))


@triton.jit
def count_rows(
    topk_idx, counts, expert, num_tokens, capacity, first, idx_stride,
    num_choices: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    seen = tl.zeros([1], tl.int32)
    for begin in range(0, num_tokens * num_choices, chunk):
        entry = begin + tl.arange(0, chunk)
        token, choice = entry // num_choices, entry % num_choices
        is_entry = token < num_tokens
        chosen = tl.load(topk_idx + token * idx_stride + choice, mask=is_entry, other=-1)
        seen += tl.sum((is_entry & (chosen == first + expert)).to(tl.int32), 0)
    tl.store(counts + expert + tl.arange(0, 1), tl.minimum(seen, capacity))


@triton.jit
def find_row(
    topk_idx, token, choice, capacity, first, num_experts, idx_stride,
    num_choices: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The row of a token's choice, -1: not here."""
    own = tl.load(topk_idx + token * idx_stride + choice)
    mine = token * num_choices + choice
    place = 0
    for begin in range(0, mine, chunk):
        entry = begin + tl.arange(0, chunk)
        chosen = tl.load(
            topk_idx + entry // num_choices * idx_stride + entry % num_choices,
            mask=entry < mine, other=-1,
        )  # fmt: skip
        place += tl.sum(((entry < mine) & (chosen == own)).to(tl.int32), 0)
    own -= first
    here = (own >= 0) & (own < num_experts) & (place < capacity)
    return tl.where(here, own.to(tl.int32) * capacity + place, -1)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "capacity", "scale_group_stride", "scales_expert_stride",
        "scales_group_stride",
    ]
)  # fmt: skip
def _copy(
    hidden, scale, topk_idx, rows, scales, row_of, counts, num_tokens, width, num_groups, capacity,
    first, num_experts, hidden_stride, idx_stride, scale_row_stride, scale_group_stride,
    scales_expert_stride, scales_group_stride,
    num_choices: tl.constexpr, chunk: tl.constexpr,
    block: tl.constexpr, groups: tl.constexpr, group_size: tl.constexpr, finds: tl.constexpr,
    has_scale: tl.constexpr, quantises: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    program, part = tl.program_id(0), tl.program_id(1)
    token, choice = program // num_choices, program % num_choices
    if token >= num_tokens:
        if part == 0:
            count_rows(
                topk_idx, counts, program - num_tokens * num_choices, num_tokens, capacity, first,
                idx_stride, num_choices, chunk,
            )  # fmt: skip
        return
    # Before the search for its place, which is long enough to wait for it.
    line = hidden + token.to(tl.int64) * hidden_stride
    if quantises:  # a block of columns is a block of groups
        group = part * groups + tl.arange(0, groups)
        is_group = group * group_size < width
        column = group[:, None] * group_size + tl.arange(0, group_size)[None, :]
        values = tl.load(line + column, mask=column < width, other=0.0)
    else:
        group = tl.arange(0, groups)
        is_group = group < tl.where(part == 0, num_groups, 0)
        column = part * block + tl.arange(0, block)
        values = tl.load(line + column, mask=column < width)
    if has_scale:
        place = token * scale_row_stride + group * scale_group_stride
        factor = tl.load(scale + place, mask=is_group)

    if finds:
        row = find_row(
            topk_idx, token, choice, capacity, first, num_experts, idx_stride, num_choices, chunk
        )
        if part == 0:
            tl.store(row_of + choice * num_tokens + token, row)
    else:
        row = tl.load(row_of + choice * num_tokens + token)
    if row < 0:
        return
    if quantises:
        values, factor = quantise_group(values.to(tl.float32), largest, smallest)
    if has_scale or quantises:
        goal = row // capacity * scales_expert_stride + row % capacity
        tl.store(scales + goal + group * scales_group_stride, factor, mask=is_group)
    tl.store(rows + row.to(tl.int64) * width + column, values, mask=column < width)


def launch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    first: int,
    scale: torch.Tensor | None,
    *,
    quantises: bool = False,
) -> MaskedRows:
    out = empty_masked(hidden, topk_idx, num_experts, capacity, scale, quantises=quantises)
    num_tokens, num_choices = topk_idx.shape
    if not num_tokens:
        out.counts.zero_()
        return out
    chunk = min(CHUNK, triton.next_power_of_2(topk_idx.numel()))
    finds, is_dependent = topk_idx.numel() <= MAX_FOUND, dependent(hidden)
    if not finds:
        _place[(num_experts,)](
            topk_idx, out.row_of, out.counts, num_tokens, capacity, first, topk_idx.stride(0),
            num_choices=num_choices, chunk=LARGE_CHUNK, dependent=is_dependent, num_warps=8,
            launch_pdl=is_dependent,
        )  # fmt: skip
    width, rows = hidden.shape[1], out.rows
    block = min(BLOCK_BYTES // hidden.element_size(), triton.next_power_of_2(width))
    if quantises:  # a row's places are looked for once, if the row is not cut
        groups = min(MAX_GROUPS, triton.next_power_of_2(width // GROUP))
        block = groups * GROUP
    else:
        groups = 1 if scale is None else triton.next_power_of_2(scale.shape[1])
        if hidden.element_size() == 1:  # bytes are bytes, and what every Triton knows
            hidden, rows = hidden.view(torch.uint8), rows.view(torch.uint8)
    num_warps = 8 if quantises and groups > MAX_GROUPS // 2 else 4
    _copy[num_tokens * num_choices + (num_experts if finds else 0), triton.cdiv(width, block)](
        hidden, scale, topk_idx, rows, out.scales, out.row_of, out.counts, num_tokens, width,
        1 if scale is None else scale.shape[1], capacity, first, num_experts, hidden.stride(0),
        topk_idx.stride(0), *((0, 0) if scale is None else scale.stride()),
        *((0, 0) if out.scales is None else (out.scales.stride(0), out.scales.stride(2))),
        num_choices=num_choices, chunk=chunk,
        block=block, groups=groups, group_size=GROUP, finds=finds, has_scale=scale is not None,
        quantises=quantises, largest=LARGEST, smallest=SMALLEST, dependent=is_dependent,
        num_warps=num_warps, launch_pdl=is_dependent,
    )  # fmt: skip
    return out
