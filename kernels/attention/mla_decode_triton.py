"""Triton path of absorbed MLA over paged latents, for any number of heads and up to 256 queries
a row.

A row's queries x heads are stacked to lines that share its latents, and cut into blocks of up to
64: the matrix instruction's height, at which one tile of latents serves as keys and as values from
one place in shared memory and the sums stay in registers.

There are as many programs as run at once. The tiles of all rows are one long list, of which each
takes an equal stretch, found from the lengths on the device. A row that one program sees whole is
finished there; the splits of the others are joined by a second kernel, from the places that
`kernels.attention.mla_decode_splits` says.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.attention.mla_decode_splits import MAX_QUERIES, TOKENS, Splits
from kernels.build.dependent_launch_triton import dependent, follow

MAX_LINES = 64
MIN_TILES = 2  # of a part: fewer are not worth a split of their own
JOINED = 8  # lines times splits that a program looks at together
LOG2_E = 1.4426950408889634


@triton.jit
def tile_ends(kv_lengths, num_rows, tokens: tl.constexpr, rows: tl.constexpr):
    """[rows] int32, number of tiles up to and with each row; those of no row repeat the last."""
    row = tl.arange(0, rows)
    lengths = tl.load(kv_lengths + row, mask=row < num_rows, other=0)
    return tl.cumsum((lengths + tokens - 1) // tokens, axis=0)


@triton.jit
def part_tiles(ends, num_parts, min_tiles):
    """Tiles of each part but the last."""
    return tl.maximum(tl.cdiv(tl.max(ends, axis=0), num_parts), min_tiles)


@triton.jit
def soften(scores, peak, dtype: tl.constexpr):
    """exp2 of scores below their peak so far; what sums with the old peak are to be multiplied by;
    the new peak; sums of the first. [lines, tokens], [lines] ..."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # A line that sees nothing yet must not compute inf - inf.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - shift[:, None])
    return p.to(dtype), tl.exp2(peak - shift), higher, tl.sum(p, axis=1)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "min_tiles"])
def _attend(
    query, cache, block_table, kv_lengths, out, out_lse, split, split_lse,
    num_rows, num_queries, table_stride, num_parts, scale, min_tiles,
    num_heads: tl.constexpr, width: tl.constexpr, value_dim: tl.constexpr,
    rope_dim: tl.constexpr, page_tokens: tl.constexpr,
    lines: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr, padded_value: tl.constexpr,
    padded_rope: tl.constexpr, exact: tl.constexpr,
    precision: tl.constexpr, num_stages: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    num_lines = num_queries * num_heads
    factor = tl.cast(scale, tl.float32)  # a float of Python may come as float64
    # Blocks of the same part run at the same time and find each other's latents in the L2 cache.
    part = tl.program_id(1)
    first_line = tl.program_id(0) * lines
    line = tl.arange(0, lines)
    is_line = line < num_lines - first_line
    value, rope = tl.arange(0, padded_value), tl.arange(0, padded_rope)
    # `exact`: the padded sizes are the real ones, nothing is masked but the end of a row.
    is_value, is_rope = value < value_dim, rope < rope_dim
    ends = tile_ends(kv_lengths, num_rows, tokens, rows)
    per_part = part_tiles(ends, num_parts, min_tiles)
    tile = part * per_part
    stop = tl.minimum(tile + per_part, tl.max(ends, axis=0))
    index = tl.arange(0, rows)

    while tile < stop:
        row = tl.sum((ends <= tile).to(tl.int32), axis=0)
        begin = tl.max(tl.where(index < row, ends, 0), axis=0)
        row_end = tl.sum(tl.where(index == row, ends, 0), axis=0)
        next_tile = tl.minimum(stop, row_end)
        length = tl.load(kv_lengths + row)
        first = (tile - begin) * tokens
        last = tl.minimum((next_tile - begin) * tokens, length)

        # Places are a scalar and a pattern that is known to the compiler: few registers.
        start = query + (row.to(tl.int64) * num_lines + first_line) * width + line[:, None] * width
        if exact:
            q = tl.load(start + value[None, :], mask=is_line[:, None], other=0.0)
            q_rope = tl.load(start + value_dim + rope[None, :], mask=is_line[:, None], other=0.0)
        else:
            inside = is_line[:, None] & is_value[None, :]
            q = tl.load(start + value[None, :], mask=inside, other=0.0)
            inside = is_line[:, None] & is_rope[None, :]
            q_rope = tl.load(start + value_dim + rope[None, :], mask=inside, other=0.0)
        # The last query of a row sees all its tokens, the one before all but one, and so on.
        query_of = (first_line + line) // num_heads
        limit = tl.minimum(length - num_queries + query_of + 1, last)
        seen_by_all = tl.minimum(length - num_queries + 1, last)

        peak = tl.full([lines], float("-inf"), tl.float32)
        weight = tl.zeros([lines], tl.float32)
        total = tl.zeros([lines, padded_value], tl.float32)
        table = block_table + row.to(tl.int64) * table_stride
        for position in tl.range(first, last, tokens, num_stages=num_stages):
            token = position + tl.arange(0, tokens)
            here = token < last
            if page_tokens % tokens == 0:
                page = tl.load(table + position // page_tokens).to(tl.int64)
                slot = page * page_tokens + position % page_tokens
                place = cache + slot * width + tl.arange(0, tokens)[:, None] * width
            else:
                page = tl.load(table + token // page_tokens, mask=here, other=0).to(tl.int64)
                place = cache + (page * page_tokens + token % page_tokens)[:, None] * width
            if exact:
                k = tl.load(place + value[None, :], mask=here[:, None], other=0.0)
                k_rope = tl.load(place + value_dim + rope[None, :], mask=here[:, None], other=0.0)
            else:
                k = tl.load(
                    place + value[None, :], mask=here[:, None] & is_value[None, :], other=0.0
                )
                k_rope = tl.load(
                    place + value_dim + rope[None, :],
                    mask=here[:, None] & is_rope[None, :], other=0.0,
                )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision=precision) * factor
            # NOTE: scaled apart, or the compiler makes one sum of them that starts in a layout of
            # its own.
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision=precision) * factor
            # NOTE: without the branch the compiler takes the two products for a chain and lets
            # both warp groups compute all scores.
            if position + tokens <= seen_by_all:
                p, fading, peak, sums = soften(scores, peak, k.dtype)
            else:
                scores = tl.where(token[None, :] < limit[:, None], scores, float("-inf"))
                p, fading, peak, sums = soften(scores, peak, k.dtype)
            weight = weight * fading + sums
            total = tl.dot(p, k, total * fading[:, None], input_precision=precision)

        is_empty = weight == 0.0
        divisor = tl.where(is_empty, 1.0, weight)
        lse = tl.where(is_empty, float("-inf"), tl.where(is_empty, 0.0, peak) + tl.log2(divisor))
        total = total * (1.0 / divisor)[:, None]
        inside = is_line[:, None] & is_value[None, :]
        if (tile == begin) & (next_tile == row_end):
            done = row.to(tl.int64) * num_lines + first_line
            place = out + done * value_dim + (line[:, None] * value_dim + value[None, :])
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)
            tl.store(out_lse + done + line, lse / LOG2_E_JIT, mask=is_line)
        else:
            done = (row + part).to(tl.int64) * num_lines + first_line
            split_place = split + done * value_dim + (line[:, None] * value_dim + value[None, :])
            tl.store(split_place, total, mask=inside)
            tl.store(split_lse + done + line, lse, mask=is_line)
        tile = next_tile


LOG2_E_JIT = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["num_rows", "min_tiles"])
def _join(
    kv_lengths, split, split_lse, out, out_lse, num_rows, num_lines, num_parts, value_dim,
    min_tiles,
    lines: tl.constexpr, splits: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr,
    padded_value: tl.constexpr, every: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """`splits` of `lines` at a time; of `every` row, or of those of several splits or none."""
    follow(dependent)
    row = tl.program_id(1)
    ends = tile_ends(kv_lengths, num_rows, tokens, rows)
    per_part = part_tiles(ends, num_parts, min_tiles)
    index = tl.arange(0, rows)
    begin = tl.max(tl.where(index < row, ends, 0), axis=0)
    end = tl.sum(tl.where(index == row, ends, 0), axis=0)
    first, last = begin // per_part, (end - 1) // per_part
    if (end > begin) & (first == last) & (not every):
        return  # one program has seen the whole row
    line = tl.program_id(0) * lines + tl.arange(0, lines)
    is_line = line < num_lines
    value = tl.arange(0, padded_value)
    inside = is_line[:, None] & (value < value_dim)[None, :]
    peak = tl.full([lines], float("-inf"), tl.float32)
    weight = tl.zeros([lines], tl.float32)
    total = tl.zeros([lines, padded_value], tl.float32)
    if end == begin:
        last = first - 1
    for start in range(first, last + 1, splits):
        part = start + tl.arange(0, splits)
        here = is_line[:, None] & (part <= last)[None, :]
        done = (row + part).to(tl.int64)[None, :] * num_lines + line[:, None]
        lse = tl.load(split_lse + done, mask=here, other=float("-inf"))
        values = tl.load(
            split + done[:, :, None] * value_dim + value[None, None, :],
            mask=here[:, :, None] & (value < value_dim)[None, None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(lse, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fading, share = tl.exp2(peak - shift), tl.exp2(lse - shift[:, None])
        weight = weight * fading + tl.sum(share, axis=1)
        total = total * fading[:, None] + tl.sum(values * share[:, :, None], axis=1)
        peak = higher
    is_empty = weight == 0.0
    divisor = tl.where(is_empty, 1.0, weight)
    lse = tl.where(is_empty, float("-inf"), tl.where(is_empty, 0.0, peak) + tl.log2(divisor))
    done = row.to(tl.int64) * num_lines + line
    place = out + done[:, None] * value_dim + value[None, :]
    tl.store(place, (total / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(out_lse + done, lse / LOG2_E_JIT, mask=is_line)


def launch(
    query: torch.Tensor,  # [B * Q, heads, C + R]
    cache: torch.Tensor,  # [pages, page_tokens, C + R]
    block_table: torch.Tensor,  # [B, P] int32
    kv_lengths: torch.Tensor,  # [B] int32, the new tokens included; 0: no row
    *,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B * Q, heads, C] and lse [B * Q, heads] float32; zeros and -inf for no row."""
    num_tokens, num_heads, width = query.shape
    num_rows = len(kv_lengths)
    num_queries = num_tokens // max(1, num_rows)
    if num_queries * num_rows != num_tokens or num_queries > MAX_QUERIES:
        raise ValueError(f"{num_tokens} tokens are not up to {MAX_QUERIES} for {num_rows} rows")
    if block_table.stride(1) != 1 or not cache.is_contiguous():
        raise ValueError("block_table rows and cache must be contiguous")
    out = query.new_empty(num_tokens, num_heads, value_dim)
    out_lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if not num_tokens:
        return out, out_lse
    num_lines, rope_dim = num_queries * num_heads, width - value_dim
    padded_value = max(16, triton.next_power_of_2(value_dim))
    padded_rope = max(16, triton.next_power_of_2(rope_dim))
    is_half = query.element_size() == 2
    # float32 needs twice the room. Three: page ids, latents and products, one iteration ahead each.
    tokens, num_stages = (TOKENS, 3) if is_half else (16, 1)
    lines = min(MAX_LINES if is_half else 16, max(16, triton.next_power_of_2(num_lines)))
    num_blocks = triton.cdiv(num_lines, lines)
    num_parts = max(1, programs(query.device, padded_value) // num_blocks)
    num_splits = num_rows + num_parts if num_parts > 1 else 0
    split = query.new_empty(num_splits, num_lines, value_dim, dtype=torch.float32)
    split_lse = query.new_empty(num_splits, num_lines, dtype=torch.float32)
    rows = triton.next_power_of_2(num_rows)
    query, is_dependent = query.contiguous(), dependent(query)
    operands = (query, cache, block_table, kv_lengths, out, out_lse, split, split_lse)
    exact = padded_value + padded_rope == width
    _attend[num_blocks, num_parts](
        *operands, num_rows, num_queries, block_table.stride(0), num_parts, scale * LOG2_E,
        MIN_TILES, num_heads=num_heads, width=width, value_dim=value_dim, rope_dim=rope_dim,
        page_tokens=cache.shape[1], lines=lines, tokens=tokens, rows=rows,
        padded_value=padded_value, padded_rope=padded_rope, exact=exact,
        # Of float32 inputs only. Three times the registers are too many for wide latents.
        precision="tf32x3" if padded_value <= 128 else "tf32",
        num_stages=num_stages, dependent=is_dependent, num_warps=8, launch_pdl=is_dependent,
    )  # fmt: skip
    join(
        kv_lengths, split, split_lse, out, out_lse, num_parts, MIN_TILES, tokens=tokens, every=False
    )
    return out, out_lse


def join_splits(splits: Splits) -> torch.Tensor:
    """As `kernels.attention.mla_decode_splits.join_reference`."""
    num_rows, (_, num_lines, value_dim) = len(splits.kv_lengths), splits.values.shape
    out = splits.values.new_empty(num_rows * num_lines, value_dim)
    join(
        splits.kv_lengths, splits.values, splits.lse, out, splits.lse.new_empty(len(out)),
        splits.num_parts, splits.min_tiles, tokens=TOKENS, every=True,
    )  # fmt: skip
    return out.view(num_rows * splits.num_queries, -1, value_dim)


def join(
    kv_lengths: torch.Tensor,
    split: torch.Tensor,
    split_lse: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
    num_parts: int,
    min_tiles: int,
    *,
    tokens: int,
    every: bool,
) -> None:
    num_rows, (_, num_lines, value_dim) = len(kv_lengths), split.shape
    # Rows of many splits are few: a program has fewer lines of them.
    splits = min(JOINED, triton.next_power_of_2(triton.cdiv(num_parts, num_rows)))
    lines, is_dependent = JOINED // splits, dependent(out)
    _join[triton.cdiv(num_lines, lines), num_rows](
        kv_lengths, split, split_lse, out, out_lse, num_rows, num_lines, num_parts, value_dim,
        min_tiles, lines=lines, splits=splits, tokens=tokens,
        rows=triton.next_power_of_2(num_rows),
        padded_value=max(16, triton.next_power_of_2(value_dim)), every=every,
        dependent=is_dependent, num_warps=4, launch_pdl=is_dependent,
    )  # fmt: skip


def programs(device: torch.device, padded_value: int) -> int:
    """How many run at once: wide latents fill the shared memory of a multiprocessor."""
    return num_multiprocessors(device) * (1 if padded_value >= 256 else 2)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Without a GPU: few for Triton's interpreter, an H200's to compile for one."""
    if device.type != "cuda":
        return 2 if device.type == "cpu" else 132
    return torch.cuda.get_device_properties(device).multi_processor_count
