"""Triton path of `kernels.permute`: a program an expert counts and ranks its choices, then a
program a token copies its row to all its places."""

import torch
import triton
import triton.language as tl

from kernels.permute import Permuted, empty_permuted

CHUNK = 1024
LARGE_CHUNK = 4096


@triton.jit
def _rank(topk_idx, rank_of, counts, num_entries, chunk: tl.constexpr):
    """rank_of[i]: which of its expert's choices entry i is."""
    expert = tl.program_id(0)
    seen = tl.zeros([1], tl.int32)
    for first in range(0, num_entries, chunk):
        entry = first + tl.arange(0, chunk)
        mine = tl.load(topk_idx + entry, mask=entry < num_entries, other=-1) == expert
        tl.store(rank_of + entry, seen + tl.cumsum(mine.to(tl.int32), 0) - 1, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert + tl.arange(0, 1), seen)


@triton.jit
def _place(
    topk_idx, rank_of, counts, hidden, scale, rows, scales, row_of, expert_of, num_tokens,
    num_choices, width, num_groups, scale_row_stride, scale_group_stride, scales_group_stride,
    num_experts, alignment,
    experts: tl.constexpr, block: tl.constexpr, groups: tl.constexpr, has_scale: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, experts)
    count = tl.load(counts + index, mask=index < num_experts, other=0)
    padded = (count + alignment - 1) // alignment * alignment
    for choice in range(num_choices):
        expert = tl.load(topk_idx + token * num_choices + choice)
        row = tl.full([], -1, tl.int64)
        if expert >= 0:
            rank = tl.load(rank_of + token * num_choices + choice)
            row = (tl.sum(tl.where(index < expert, padded, 0), 0) + rank).to(tl.int64)
            for first in range(0, width, block):
                column = first + tl.arange(0, block)
                values = tl.load(hidden + token * width + column, mask=column < width)
                tl.store(rows + row * width + column, values, mask=column < width)
            if has_scale:
                group = tl.arange(0, groups)
                place = token * scale_row_stride + group * scale_group_stride
                factor = tl.load(scale + place, mask=group < num_groups)
                goal = scales + row + group * scales_group_stride
                tl.store(goal, factor, mask=group < num_groups)
            tl.store(expert_of + row, expert.to(tl.int32))
        tl.store(row_of + choice * num_tokens + token, row.to(tl.int32))


def rank_choices(topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] int64, contiguous -> which of its expert's choices each one is [T K] int32
    (those of -1: anything), and counts [E] int32."""
    rank_of = torch.empty(topk_idx.numel(), dtype=torch.int32, device=topk_idx.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=topk_idx.device)
    # Each program looks at all choices: fewer and longer looks, where there are many.
    is_large = topk_idx.numel() > CHUNK
    _rank[(num_experts,)](
        topk_idx, rank_of, counts, topk_idx.numel(), chunk=LARGE_CHUNK if is_large else CHUNK,
        num_warps=8 if is_large else 4,
    )  # fmt: skip
    return rank_of, counts


def launch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    alignment: int,
    scale: torch.Tensor | None,
    most: int | None = None,
) -> Permuted:
    permuted = empty_permuted(hidden, topk_idx, num_experts, alignment, scale, most)
    permuted.expert_of.fill_(-1)
    num_tokens, num_choices = topk_idx.shape
    topk_idx = topk_idx.contiguous()
    rank_of, counts = rank_choices(topk_idx, num_experts)
    permuted.counts.copy_(counts)
    if not num_tokens:
        return permuted
    width = hidden.shape[1]
    num_groups = 1 if scale is None else scale.shape[1]
    # Bytes are bytes: FP8 travels as what every Triton knows.
    view = torch.uint8 if hidden.element_size() == 1 else hidden.dtype
    _place[(num_tokens,)](
        topk_idx, rank_of, counts, hidden.view(view), scale, permuted.rows.view(view),
        permuted.scales, permuted.row_of, permuted.expert_of, num_tokens, num_choices, width,
        num_groups, *((0, 0) if scale is None else scale.stride()),
        0 if permuted.scales is None else permuted.scales.stride(1), num_experts, alignment,
        experts=triton.next_power_of_2(num_experts),
        block=min(4096, triton.next_power_of_2(width)),
        groups=triton.next_power_of_2(num_groups), has_scale=scale is not None, num_warps=4,
    )  # fmt: skip
    return permuted
