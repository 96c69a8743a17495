"""Triton path of `permute`: a program an expert counts and ranks its choices, then programs
of a token copy a part of its row to all its places, and a few more say whose each row is."""

import torch
import triton
import triton.language as tl

from kernels.build.aligned_rows import Permuted, empty_permuted

CHUNK = 1024
LARGE_CHUNK = 4096
HUGE_CHUNK = 8192  # from two of them on
PROGRAMS = 128  # that rank, at most, if there are fewer experts
# Columns and warps of a program.
FEW_TOKENS = (2048, 4)
MANY_TOKENS = (8192, 16)
NAMED = 4096  # pairs of a row and an expert that a program looks at, to say whose the rows are


@triton.jit(do_not_specialize=["num_entries"])
def _rank(topk_idx, rank_of, counts, num_entries, part_size, chunk: tl.constexpr):
    """rank_of[i]: which of its expert's choices entry i is. A program a part of the entries: it
    counts those before it."""
    expert, begin = tl.program_id(0), tl.program_id(1) * part_size
    before = tl.zeros([chunk], tl.int32)
    for first in range(0, begin, chunk):
        chosen = tl.load(topk_idx + first + tl.arange(0, chunk))
        before += (chosen == expert).to(tl.int32)
    seen = tl.sum(before, 0)
    for first in range(begin, tl.minimum(begin + part_size, num_entries), chunk):
        entry = first + tl.arange(0, chunk)
        mine = tl.load(topk_idx + entry, mask=entry < num_entries, other=-1) == expert
        tl.store(rank_of + entry, seen + tl.cumsum(mine.to(tl.int32), 0) - 1, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
    if begin + part_size >= num_entries:
        tl.store(counts + expert, seen)


@triton.jit(do_not_specialize=["num_rows"])
def _name_rows(
    counts, ends, expert_of, first, num_rows, num_experts, alignment, experts: tl.constexpr,
    named: tl.constexpr,
):  # fmt: skip
    """expert_of[first : first + named], and all `ends` if these are the first."""
    index = tl.arange(0, experts)
    count = tl.load(counts + index, mask=index < num_experts, other=0)
    padded = (count + alignment - 1) // alignment * alignment
    start = tl.cumsum(padded, 0) - padded
    end = tl.minimum(start + count, num_rows)
    tl.store(ends + index, end, mask=index < tl.where(first == 0, num_experts, 0))
    place = first + tl.arange(0, named)
    past = place[:, None] - start[None, :]
    owner = tl.where((past >= 0) & (past < count[None, :]), index[None, :], -1)
    tl.store(expert_of + place, tl.max(owner, axis=1), mask=place < num_rows)


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "scale_group_stride", "scales_group_stride"]
)
def _place(
    topk_idx, rank_of, counts, hidden, scale, rows, scales, row_of, ends, expert_of, num_tokens,
    num_rows, width, num_groups, scale_row_stride, scale_group_stride, scales_group_stride,
    num_experts, alignment,
    num_choices: tl.constexpr, padded_choices: tl.constexpr, experts: tl.constexpr,
    named: tl.constexpr, block: tl.constexpr, groups: tl.constexpr, has_scale: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0), tl.program_id(1)
    if token >= num_tokens:
        if part == 0:
            first = (token - num_tokens) * named
            _name_rows(
                counts, ends, expert_of, first, num_rows, num_experts, alignment, experts, named
            )
        return
    slot = tl.arange(0, padded_choices)
    entry = token * num_choices + slot
    chosen = tl.load(topk_idx + entry, mask=slot < num_choices, other=-1)
    # What is no expert has neither rank nor room.
    chosen = tl.where((chosen >= 0) & (chosen < num_experts), chosen, -1).to(tl.int32)
    # Under way while the places are worked out.
    most = tl.max(chosen, axis=0)
    column = part * block + tl.arange(0, block)
    inside = (column < width) & (most + tl.zeros_like(column) >= 0)
    values = tl.load(hidden + token.to(tl.int64) * width + column, mask=inside)
    group = tl.arange(0, groups)
    is_group = group < tl.where(part == 0, num_groups, 0)
    is_group &= most + tl.zeros_like(group) >= 0
    if has_scale:
        place = token * scale_row_stride + group * scale_group_stride
        factor = tl.load(scale + place, mask=is_group)
    rank = tl.load(rank_of + entry, mask=chosen >= 0, other=0)
    index = tl.arange(0, experts)
    count = tl.load(counts + index, mask=index < num_experts, other=0)
    padded = (count + alignment - 1) // alignment * alignment
    before = tl.where(index[None, :] < chosen[:, None], padded[None, :], 0)
    found = tl.where(chosen >= 0, tl.sum(before, axis=1) + rank, -1)
    found = tl.where(found < num_rows, found, -1)  # of more choices than `most`
    last = tl.where(part == 0, num_choices, 0)
    tl.store(row_of + slot * num_tokens + token, found, mask=slot < last)
    for choice in tl.static_range(num_choices):
        row = tl.sum(tl.where(slot == choice, found, 0), 0).to(tl.int64)
        if row >= 0:
            tl.store(rows + row * width + column, values, mask=column < width)
            if has_scale:
                tl.store(scales + row + group * scales_group_stride, factor, mask=is_group)


def rank_choices(
    topk_idx: torch.Tensor,
    num_experts: int,
    counts: torch.Tensor | None = None,
    *,
    chunk: int = 0,
    parts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] int64, contiguous -> which of its expert's choices each one is [T K] int32
    (those of -1: anything), and counts [E] int32, written to those given."""
    rank_of = torch.empty(topk_idx.numel(), dtype=torch.int32, device=topk_idx.device)
    if counts is None:
        counts = torch.empty(num_experts, dtype=torch.int32, device=topk_idx.device)
    num_entries = topk_idx.numel()
    # Each program looks at all choices up to its own: fewer and longer looks, where there are many.
    usual = (CHUNK, 4) if num_entries <= CHUNK else (LARGE_CHUNK, 8)
    if num_entries >= 2 * HUGE_CHUNK:
        usual = (HUGE_CHUNK, 16)
    chunk, num_warps = chunk or usual[0], usual[1]
    parts = min(parts or max(1, PROGRAMS // num_experts), triton.cdiv(num_entries, chunk))
    part_size = triton.cdiv(triton.cdiv(num_entries, max(1, parts)), chunk) * chunk
    _rank[num_experts, max(1, triton.cdiv(num_entries, max(1, part_size)))](
        topk_idx, rank_of, counts, num_entries, part_size, chunk=chunk,
        num_warps=num_warps,
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
    num_tokens, num_choices = topk_idx.shape
    topk_idx = topk_idx.contiguous()
    rank_of, counts = rank_choices(topk_idx, num_experts, permuted.counts)
    width, num_rows = hidden.shape[1], len(permuted.rows)
    num_groups = 1 if scale is None else scale.shape[1]
    experts = triton.next_power_of_2(num_experts)
    named = max(16, NAMED // experts)
    block, num_warps = FEW_TOKENS if num_tokens < 1024 else MANY_TOKENS
    block = min(block, triton.next_power_of_2(width))
    # Bytes are bytes: FP8 travels as what every Triton knows.
    view = torch.uint8 if hidden.element_size() == 1 else hidden.dtype
    # Without tokens one is left, for `ends`.
    programs = num_tokens + max(1, triton.cdiv(num_rows, named))
    _place[programs, triton.cdiv(width, block)](
        topk_idx, rank_of, counts, hidden.view(view), scale, permuted.rows.view(view),
        permuted.scales, permuted.row_of, permuted.ends, permuted.expert_of, num_tokens, num_rows,
        width,
        num_groups, *((0, 0) if scale is None else scale.stride()),
        0 if permuted.scales is None else permuted.scales.stride(1), num_experts, alignment,
        num_choices=num_choices, padded_choices=triton.next_power_of_2(num_choices),
        experts=experts, named=named, block=block,
        groups=triton.next_power_of_2(num_groups), has_scale=scale is not None,
        num_warps=num_warps,
    )  # fmt: skip
    return permuted
