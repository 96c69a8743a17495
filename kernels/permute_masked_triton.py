"""Triton path of `kernels.permute_masked`: a program an expert counts and places its choices, then
programs of a token copy its row to all its places."""

import torch
import triton
import triton.language as tl

from kernels.permute_masked import MaskedRows, empty_masked

CHUNK = 1024
BLOCK_BYTES = 8192  # of a row, a program


@triton.jit
def _place(
    topk_idx, row_of, counts, num_tokens, capacity, first, idx_stride,
    num_choices: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
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
def _copy(
    hidden, scale, rows, scales, row_of, num_tokens, width, num_groups, capacity, hidden_stride,
    scale_row_stride, scale_group_stride, scales_expert_stride, scales_group_stride,
    num_choices: tl.constexpr, block: tl.constexpr, groups: tl.constexpr, has_scale: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    values = tl.load(hidden + token * hidden_stride + column, mask=inside)
    for choice in tl.static_range(num_choices):
        row = tl.load(row_of + choice * num_tokens + token).to(tl.int64)
        if row >= 0:
            tl.store(rows + row * width + column, values, mask=inside)
            if has_scale:
                group = tl.arange(0, groups)
                is_group = group < tl.where(tl.program_id(1) == 0, num_groups, 0)
                place = token * scale_row_stride + group * scale_group_stride
                factor = tl.load(scale + place, mask=is_group)
                goal = row // capacity * scales_expert_stride + row % capacity
                tl.store(scales + goal + group * scales_group_stride, factor, mask=is_group)


def launch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    first: int,
    scale: torch.Tensor | None,
) -> MaskedRows:
    out = empty_masked(hidden, topk_idx, num_experts, capacity, scale)
    num_tokens, num_choices = topk_idx.shape
    if not num_tokens:
        out.counts.zero_()
        return out
    chunk = min(CHUNK, triton.next_power_of_2(topk_idx.numel()))
    _place[(num_experts,)](
        topk_idx, out.row_of, out.counts, num_tokens, capacity, first, topk_idx.stride(0),
        num_choices=num_choices, chunk=chunk, num_warps=4,
    )  # fmt: skip
    width = hidden.shape[1]
    # Bytes are bytes: FP8 travels as what every Triton knows.
    view = torch.uint8 if hidden.element_size() == 1 else hidden.dtype
    block = min(BLOCK_BYTES // hidden.element_size(), triton.next_power_of_2(width))
    num_groups = 1 if scale is None else scale.shape[1]
    _copy[num_tokens, triton.cdiv(width, block)](
        hidden.view(view), scale, out.rows.view(view), out.scales, out.row_of, num_tokens, width,
        num_groups, capacity, hidden.stride(0), *((0, 0) if scale is None else scale.stride()),
        *((0, 0) if out.scales is None else (out.scales.stride(0), out.scales.stride(2))),
        num_choices=num_choices, block=block, groups=triton.next_power_of_2(num_groups),
        has_scale=scale is not None, num_warps=4,
    )  # fmt: skip
    return out
