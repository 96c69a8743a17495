"""Triton path of `mla_prefill`: attention of blocks of new tokens over a group of expanded
keys, merged with what earlier groups gave."""

import torch
import triton
import triton.language as tl

from kernels.attention.mla_prefill_plan import BLOCK_QUERIES, KeyGroup
from kernels.build.operands import check_contiguous

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def look(
    total, weight, peak, q, q_rope, both, key_rope, first, last, shift, scale, key_stride,
    rope_stride, query,
    nope_dim: tl.constexpr, rope_dim: tl.constexpr, value_dim: tl.constexpr,
    padded_nope: tl.constexpr, padded_rope: tl.constexpr, padded_value: tl.constexpr,
    keys: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """Goes through keys first .. last, which must be whole steps unless `masked`. `peak` is the
    largest product so far, without the scale."""
    nope, rope = tl.arange(0, padded_nope), tl.arange(0, padded_rope)
    column = tl.arange(0, padded_value)
    for start in tl.range(first, last, keys, num_stages=num_stages):
        index = tl.arange(0, keys)
        here = (start + index < last)[:, None] if masked else (index >= 0)[:, None]
        line = both + start * key_stride + index[:, None] * key_stride
        rope_line = key_rope + start * rope_stride + index[:, None] * rope_stride
        k = tl.load(line + nope[None, :], mask=here & (nope < nope_dim)[None, :], other=0.0)
        k_rope = tl.load(
            rope_line + rope[None, :], mask=here & (rope < rope_dim)[None, :], other=0.0
        )
        v = tl.load(
            line + nope_dim + column[None, :], mask=here & (column < value_dim)[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=precision)
        if masked:
            seen = (start + index)[None, :] <= tl.minimum(query + shift, last - 1)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A line that sees nothing must not compute inf - inf.
        below = tl.where(higher == float("-inf"), 0.0, higher)
        # The scale comes with the difference, as one instruction.
        fading = tl.exp2(peak * scale - below * scale)
        p = tl.exp2(scores * scale - (below * scale)[:, None])
        weight = weight * fading + tl.sum(p, axis=1)
        total = tl.dot(p.to(v.dtype), v, total * fading[:, None], input_precision=precision)
        peak = higher
    return total, weight, peak


@triton.jit
def _attend(
    query, both, key_rope, blocks, out, out_lse, num_heads, query_stride, head_stride, key_stride,
    rope_stride, scale,
    nope_dim: tl.constexpr, rope_dim: tl.constexpr, value_dim: tl.constexpr,
    padded_nope: tl.constexpr, padded_rope: tl.constexpr, padded_value: tl.constexpr,
    queries: tl.constexpr, cut: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
    num_stages: tl.constexpr,
):  # fmt: skip
    # Blocks of one head run beside each other and find its keys in the L2 cache.
    head = tl.program_id(1).to(tl.int64)
    block = blocks + tl.program_id(0) // cut * 6
    skipped = tl.program_id(0) % cut * queries
    count = tl.load(block + 1) - skipped
    if count <= 0:
        return
    token = tl.load(block).to(tl.int64) + skipped
    shift = tl.load(block + 4) + skipped
    seen = tl.minimum(tl.load(block + 3), shift + tl.minimum(count, queries))
    is_first = tl.load(block + 5) != 0
    if (seen <= 0) & (is_first == 0):
        return
    line, nope, rope = tl.arange(0, queries), tl.arange(0, padded_nope), tl.arange(0, padded_rope)
    column = tl.arange(0, padded_value)
    is_line = line < count
    place = query + token * query_stride + head * head_stride + line[:, None] * query_stride
    q = tl.load(
        place + nope[None, :], mask=is_line[:, None] & (nope < nope_dim)[None, :], other=0.0
    )
    q_rope = tl.load(
        place + nope_dim + rope[None, :], mask=is_line[:, None] & (rope < rope_dim)[None, :],
        other=0.0,
    )  # fmt: skip
    key = tl.load(block + 2).to(tl.int64)
    both += key * key_stride + head * (nope_dim + value_dim)
    key_rope += key * rope_stride

    peak = tl.full([queries], float("-inf"), tl.float32)
    weight = tl.zeros([queries], tl.float32)
    total = tl.zeros([queries, padded_value], tl.float32)
    # All queries see the first keys, the last ones differ.
    seen_by_all = tl.minimum(tl.maximum(shift + 1, 0), seen) // keys * keys
    total, weight, peak = look(
        total, weight, peak, q, q_rope, both, key_rope, 0, seen_by_all, shift, scale, key_stride,
        rope_stride, line, nope_dim, rope_dim, value_dim, padded_nope, padded_rope, padded_value,
        keys, False, precision, num_stages,
    )  # fmt: skip
    total, weight, peak = look(
        total, weight, peak, q, q_rope, both, key_rope, seen_by_all, seen, shift, scale,
        key_stride, rope_stride, line, nope_dim, rope_dim, value_dim, padded_nope, padded_rope,
        padded_value, keys, True, precision, num_stages,
    )  # fmt: skip

    peak *= scale
    inside = is_line[:, None] & (column < value_dim)[None, :]
    place = token * num_heads + head + line * num_heads
    out_place = out + place[:, None] * value_dim + column[None, :]
    if is_first == 0:
        # In base 2 what earlier groups gave is one more key, with their log-sum as its score.
        before = tl.load(out_lse + place, mask=is_line, other=0.0) * LOG2_E
        values = tl.load(out_place, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, before)
        fading, share = tl.exp2(peak - higher), tl.exp2(before - higher)
        total = total * fading[:, None] + values * share[:, None]
        weight = weight * fading + share
        peak = higher
    total = total / weight[:, None]
    tl.store(out_place, total.to(out.dtype.element_ty), mask=inside)
    tl.store(out_lse + place, (peak + tl.log2(weight)) / LOG2_E, mask=is_line)


def launch(
    query: torch.Tensor,  # [T, heads, D + R]
    both: torch.Tensor,  # [keys, heads, D + V], key without its rotated part, then value
    key_rope: torch.Tensor,  # [keys, R]
    group: KeyGroup,
    out: torch.Tensor,  # [T, heads, V], changed in place
    lse: torch.Tensor,  # [T, heads] float32, changed in place: natural logarithm of sums of exp
    *,
    scale: float,
) -> None:
    num_heads, value_dim, rope_dim = query.shape[1], out.shape[2], key_rope.shape[1]
    nope_dim = both.shape[2] - value_dim
    assert query.shape[2] == nope_dim + rope_dim
    assert query.stride(2) == key_rope.stride(1) == 1
    check_contiguous(both=both, out=out, lse=lse)
    if not len(group.blocks):
        return
    queries, keys, num_stages, num_warps = BLOCK_QUERIES, 64, 3, 8
    if query.element_size() > 2:
        queries, keys, num_stages, num_warps = 32, 32, 1, 4
    cut = BLOCK_QUERIES // queries
    padded = [max(16, triton.next_power_of_2(each)) for each in (nope_dim, rope_dim, value_dim)]
    _attend[len(group.blocks) * cut, num_heads](
        query, both, key_rope, group.blocks, out, lse, num_heads, *query.stride()[:2],
        both.stride(0), key_rope.stride(0), scale * LOG2_E.value, nope_dim=nope_dim,
        rope_dim=rope_dim, value_dim=value_dim, padded_nope=padded[0], padded_rope=padded[1],
        padded_value=padded[2], queries=queries, cut=cut, keys=keys,
        precision="tf32x3", num_stages=num_stages, num_warps=num_warps,
    )  # fmt: skip
