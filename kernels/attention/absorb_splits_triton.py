"""`kernels.attention.absorb` on splits of latents: a program a head and block of rows.

All splits of the rows are multiplied as if they were tokens, next to each other as their places
are; then the products are joined. So a row of many splits takes no longer than many rows.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.mla_decode_splits import TOKENS, Splits
from kernels.attention.mla_decode_triton import part_tiles, tile_ends
from kernels.build.dependent_launch_triton import dependent
from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.elementwise.quantise_triton import quantise_group

MAX_ROWS = 16  # up to which this is faster than joining first


@triton.jit(do_not_specialize=["num_rows", "num_parts", "min_tiles"])
def _absorb_splits(
    kv_lengths, split, split_lse, weight, out, scale, num_rows, num_heads, num_parts, min_tiles,
    weight_head_stride, scale_stride,
    latent_dim: tl.constexpr, group: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    rows: tl.constexpr, block_rows: tl.constexpr, places: tl.constexpr, block_k: tl.constexpr,
    tile_tokens: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """`places` at a time."""
    if dependent:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_row = row < num_rows
    ends = tile_ends(kv_lengths, num_rows, tile_tokens, rows)
    per_part = part_tiles(ends, num_parts, min_tiles)
    is_here = tl.arange(0, rows)[None, :] == row[:, None]
    end = tl.sum(tl.where(is_here, ends[None, :], 0), axis=1)
    length = tl.load(kv_lengths + row, mask=is_row, other=0)
    count = (length + tile_tokens - 1) // tile_tokens
    # Places of each row, and of all of them.
    first = row + (end - count) // per_part
    last = tl.where(count > 0, row + (end - 1) // per_part, -1)
    stop = tl.max(last, axis=0) + 1
    start = tl.min(tl.where(count > 0, first, stop), axis=0)
    column, index = tl.arange(0, group), tl.arange(0, block_k)
    w_line = weight + head.to(tl.int64) * weight_head_stride + column[None, :] * latent_dim
    peak = tl.full([block_rows], float("-inf"), tl.float32)
    sums = tl.zeros([block_rows], tl.float32)
    total = tl.zeros([block_rows, group], tl.float32)
    if dependent:
        tl.extra.cuda.gdc_wait()
    for chunk in range(start, stop, places):
        place = chunk + tl.arange(0, places)
        belongs = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
        is_used = tl.max(belongs.to(tl.int32), axis=0) > 0
        line = place.to(tl.int64) * num_heads + head
        part = tl.zeros([places, group], tl.float32)
        for k in range(0, latent_dim, block_k):
            x_place = split + line[:, None] * latent_dim + k + index[None, :]
            x = tl.load(x_place, mask=is_used[:, None], other=0.0)
            w = tl.load(w_line + k + index[:, None])
            part = tl.dot(x, w, part)
        lse = tl.load(split_lse + line, mask=is_used, other=0.0)
        scores = tl.where(belongs, lse[None, :], float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A row without splits here must not compute inf - inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        share, fading = tl.exp2(scores - shift[:, None]), tl.exp2(peak - shift)
        sums = sums * fading + tl.sum(share, axis=1)
        total = tl.dot(share, part, total * fading[:, None], input_precision="tf32")
        peak = higher
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    values, factor = quantise_group(total, largest, smallest)
    goal = row.to(tl.int64)[:, None] * (num_heads * group) + head * group + column[None, :]
    tl.store(out + goal, values, mask=is_row[:, None])
    tl.store(scale + head.to(tl.int64) * scale_stride + row, factor, mask=is_row)


def launch(splits: Splits, kv_b: torch.Tensor, nope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `absorb.absorb_values`, of one query a row. It may begin early, and lets the
    kernel after it do so."""
    assert splits.num_queries == 1
    num_rows, (_, num_heads, latent_dim) = len(splits.kv_lengths), splits.values.shape
    weight = kv_b[:, nope_dim:]
    assert weight.shape == (num_heads, GROUP, latent_dim)
    assert weight.stride()[1:] == (latent_dim, 1)
    out = splits.values.new_empty(num_rows, num_heads * GROUP, dtype=torch.float8_e4m3fn)
    scale = empty_scales(out)
    is_few, is_dependent = num_rows <= 8, dependent(out)
    _absorb_splits[num_heads, triton.cdiv(num_rows, MAX_ROWS)](
        splits.kv_lengths, splits.values, splits.lse, weight, out, scale, num_rows, num_heads,
        splits.num_parts, splits.min_tiles, weight.stride(0), scale.stride(1),
        latent_dim=latent_dim, group=GROUP, largest=LARGEST, smallest=SMALLEST,
        rows=triton.next_power_of_2(num_rows), block_rows=MAX_ROWS,
        places=32 if num_rows == 1 else 64 if is_few else 128, block_k=128 if is_few else 64,
        tile_tokens=TOKENS, dependent=is_dependent, num_warps=4 if is_few else 8,
        num_stages=3 if is_few else 4, launch_pdl=is_dependent,
    )  # fmt: skip
    return out, scale
