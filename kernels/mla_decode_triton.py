"""Triton path of absorbed MLA over paged latents, for any number of heads and up to 8 queries a
row.

A row's queries x heads are stacked to lines that share its latents; its tokens are cut into
splits, so that few rows fill the device too. Each program goes through one split for a block of
lines with a running maximum; a second kernel joins the splits. Nothing waits for the host.
"""

import torch
import triton
import triton.language as tl

MAX_QUERIES = 8
TOKENS = 32  # of a step of the inner loop
PROGRAMS = 264  # enough for two on each multiprocessor of an H200


@triton.jit
def _attend(
    query, cache, block_table, kv_lengths, part, part_lse,
    num_queries, num_heads, table_stride, page_tokens, width, value_dim, rope_dim, num_splits,
    scale,
    lines: tl.constexpr, tokens: tl.constexpr, padded_value: tl.constexpr,
    padded_rope: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_lines = num_queries * num_heads
    line = tl.program_id(0) * lines + tl.arange(0, lines)
    is_line = line < num_lines
    value, rope = tl.arange(0, padded_value), tl.arange(0, padded_rope)
    start = query + (row * num_lines + line)[:, None] * width
    is_value, is_rope = value < value_dim, rope < rope_dim
    q = tl.load(start + value[None, :], mask=is_line[:, None] & is_value[None, :], other=0.0)
    q_rope = tl.load(
        start + value_dim + rope[None, :], mask=is_line[:, None] & is_rope[None, :], other=0.0
    )
    length = tl.load(kv_lengths + row)
    # The last query of a row sees all its tokens, the one before all but one, and so on.
    limit = length - num_queries + line // num_heads + 1
    per_split = tl.cdiv(tl.cdiv(length, num_splits), tokens) * tokens
    first, last = split * per_split, tl.minimum((split + 1) * per_split, length)

    peak = tl.full([lines], float("-inf"), tl.float32)
    weight = tl.zeros([lines], tl.float32)
    total = tl.zeros([lines, padded_value], tl.float32)
    for position in range(first, last, tokens):
        token = position + tl.arange(0, tokens)
        here = token < last
        page = tl.load(block_table + row * table_stride + token // page_tokens, mask=here, other=0)
        place = cache + (page.to(tl.int64) * page_tokens + token % page_tokens)[:, None] * width
        k = tl.load(place + value[None, :], mask=here[:, None] & is_value[None, :], other=0.0)
        k_rope = tl.load(
            place + value_dim + rope[None, :], mask=here[:, None] & is_rope[None, :], other=0.0
        )
        scores = (tl.dot(q, tl.trans(k)) + tl.dot(q_rope, tl.trans(k_rope))) * scale
        scores = tl.where((token[None, :] < limit[:, None]) & here[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A line that sees nothing yet must not compute inf - inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp(peak - shift)
        p = tl.exp(scores - shift[:, None])
        weight = weight * fading + tl.sum(p, axis=1)
        total = total * fading[:, None] + tl.dot(p.to(k.dtype), k)
        peak = higher
    is_empty = weight == 0.0
    divisor = tl.where(is_empty, 1.0, weight)
    lse = tl.where(is_empty, float("-inf"), tl.where(is_empty, 0.0, peak) + tl.log(divisor))
    out = (row * num_lines + line) * num_splits + split
    place = part + out[:, None] * value_dim + value[None, :]
    tl.store(place, total / divisor[:, None], mask=is_line[:, None] & is_value[None, :])
    tl.store(part_lse + out, lse, mask=is_line)


@triton.jit
def _join(
    part, part_lse, out, out_lse, value_dim, num_splits,
    splits: tl.constexpr, padded_value: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    split, value = tl.arange(0, splits), tl.arange(0, padded_value)
    is_split = split < num_splits
    lse = tl.load(part_lse + line * num_splits + split, mask=is_split, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(lse - shift)
    weight = tl.sum(share, axis=0)
    place = part + (line * num_splits + split)[:, None] * value_dim + value[None, :]
    is_value = value < value_dim
    inside = is_split[:, None] & is_value[None, :]
    parts = tl.load(place, mask=inside, other=0.0)
    divisor = tl.where(weight == 0.0, 1.0, weight)
    joined = tl.sum(parts * share[:, None], axis=0) / divisor
    tl.store(out + line * value_dim + value, joined.to(out.dtype.element_ty), mask=is_value)
    tl.store(out_lse + line, tl.where(weight == 0.0, float("-inf"), shift + tl.log(divisor)))


def launch(
    query: torch.Tensor,  # [B * Q, heads, C + R]
    cache: torch.Tensor,  # [pages, page_tokens, C + R]
    block_table: torch.Tensor,  # [B, P] int32
    kv_lengths: torch.Tensor,  # [B] int32, the new tokens included
    *,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B * Q, heads, C] and lse [B * Q, heads] float32."""
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
    num_lines = num_queries * num_heads
    lines = min(64, max(16, triton.next_power_of_2(num_lines)))
    num_blocks = triton.cdiv(num_lines, lines)
    most = triton.cdiv(block_table.shape[1] * cache.shape[1], 4 * TOKENS)
    num_splits = max(1, min(64, most, PROGRAMS // (num_blocks * num_rows)))
    part = query.new_empty(num_tokens * num_heads, num_splits, value_dim, dtype=torch.float32)
    part_lse = query.new_empty(num_tokens * num_heads, num_splits, dtype=torch.float32)
    padded_value = triton.next_power_of_2(value_dim)
    _attend[num_blocks, num_rows, num_splits](
        query.contiguous(), cache, block_table, kv_lengths, part, part_lse, num_queries, num_heads,
        block_table.stride(0), cache.shape[1], width, value_dim, width - value_dim, num_splits,
        scale, lines=lines, tokens=TOKENS, padded_value=max(16, padded_value),
        padded_rope=max(16, triton.next_power_of_2(width - value_dim)), num_warps=8,
        num_stages=2 if query.element_size() == 2 else 1,  # float32 fills the shared memory
    )  # fmt: skip
    _join[(num_tokens * num_heads,)](
        part, part_lse, out, out_lse, value_dim, num_splits,
        splits=triton.next_power_of_2(num_splits), padded_value=padded_value, num_warps=4,
    )  # fmt: skip
    return out, out_lse
