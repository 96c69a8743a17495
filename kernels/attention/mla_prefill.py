"""Multi-head latent attention with plain heads, ragged rows over paged latents.

A row's latents, cached prefix and new tokens alike, are expanded to keys and values per head:

    (key_nope[s, h], value[s, h]) = kv_b[h] @ cache[s, :C]
    key[s, h]     = (key_nope[s, h], cache[s, C:])
    out[t, h, :]  = sum over s <= t of softmax_s(scale * query[t, h] . key[s, h]) * value[s, h]

    query   [T, heads, D + R]  rotated part last
    cache   [pages, page_tokens, C + R]  one layer
    kv_b    [heads, D + V, C]  dtype of query; or float8_e4m3fn with `kv_b_scale`
            [heads * (D + V) / 128, C / 128] float32, rounded up, of 128 x 128 values: latents are
            quantised then, too, and the error of that is below 4% in either
    rows    of `kernels.attention.paged_rows.split_rows`
    groups  of `kernels.attention.mla_prefill_plan.plan_groups` for the same rows
    out     [T, heads, V]      dtype of query; softmax in float32

`mla_prefill`, a row at a time, is the reference. `mla_prefill_grouped` expands a bounded number of
latents at once and merges what their values give; Triton and CUDA (DeepSeek-V3's heads) do that
where they attend. In bfloat16 they are within 1e-2 of the reference in float32, relative by norm,
for each hundred groups of a row: what is merged is rounded in between.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.attention import mla_prefill_cuda
from kernels.attention.mla_prefill_plan import KeyGroup
from kernels.attention.paged_rows import Row
from kernels.build.fp8_scales import empty_scales
from kernels.build.operands import FLOATS, check_contiguous, check_ids, check_operand
from kernels.build.paths import best_path, note
from kernels.elementwise.quantise import quantise
from kernels.gemm.fp8_gemm import fp8_gemm
from kernels.gemm.linear import linear

QUERY_BLOCK = 128  # small enough that a block's scores stay near the cache


def mla_prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    rows: Sequence[Row],
    *,
    scale: float,
    kv_b_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, and on a CPU for pages of no cache."""
    _check(query, cache, kv_b, kv_b_scale)
    for row in rows:
        if row.stop > len(query) or row.kv_length > len(row.pages) * cache.shape[1]:
            raise ValueError(f"{row} does not fit {len(query)} tokens, {tuple(cache.shape)}")
        check_ids("pages", row.pages, 0, len(cache))
    note("mla_prefill", "reference")
    out = empty_values(query, cache, kv_b)
    value_dim = out.shape[2]
    for row in rows:
        key, value = row_keys(cache, kv_b, kv_b_scale, row, value_dim)
        new = query[row.start : row.stop].transpose(0, 1)
        out[row.start : row.stop] = attend_in_blocks(new, key, value, scale).transpose(0, 1)
    return out


def mla_prefill_grouped(
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    groups: Sequence[KeyGroup],
    *,
    scale: float,
    out: torch.Tensor | None = None,
    kv_b_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out`: contiguous, to write to; tokens that are in no group are left alone. Raises ValueError
    for arguments that do not fit, and on a CPU for slots that there are not."""
    _check(query, cache, kv_b, kv_b_scale)
    _check_groups(query, cache, groups)
    if out is None:
        out = empty_values(query, cache, kv_b)
    else:
        shape = (*query.shape[:2], value_dim_of(query, cache, kv_b))
        check_operand("out", out, query.device, query.dtype, shape=shape)
        check_contiguous(out=out)
    path = note("mla_prefill", path_for(query, cache, kv_b))
    attend: Callable[..., None] = attend_group_reference
    if path == "cuda":
        attend = mla_prefill_cuda.launch
    elif path == "triton":
        from kernels.attention.mla_prefill_triton import launch

        attend = launch
    attend_groups(attend, query, cache, kv_b, kv_b_scale, groups, out, scale)
    return out


def mla_prefill_quantised(
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    groups: Sequence[KeyGroup],
    *,
    scale: float,
    kv_b_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantise` makes, bit for bit, of what `mla_prefill_grouped` gives as [T, heads * V];
    tokens that are in no group are undefined. Raises ValueError as that."""
    _check(query, cache, kv_b, kv_b_scale)
    _check_groups(query, cache, groups)
    out = empty_values(query, cache, kv_b)
    if path_for(query, cache, kv_b) != "cuda":
        mla_prefill_grouped(query, cache, kv_b, groups, scale=scale, out=out, kv_b_scale=kv_b_scale)
        return quantise(out.flatten(1))
    note("mla_prefill", "cuda")
    values = torch.empty_like(out.flatten(1), dtype=torch.float8_e4m3fn)
    quantised = values, empty_scales(values)
    attend = partial(mla_prefill_cuda.launch, quantised=quantised)
    attend_groups(attend, query, cache, kv_b, kv_b_scale, groups, out, scale)
    return quantised


def path_for(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> str:
    """The path of both."""
    path = best_path("mla_prefill", query.device)
    is_taken = path != "cuda" or mla_prefill_cuda.takes(query, cache, kv_b)
    return path if is_taken else "triton"


def empty_values(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """[T, heads, V]."""
    return query.new_empty(*query.shape[:2], value_dim_of(query, cache, kv_b))


def value_dim_of(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> int:
    rope_dim = cache.shape[2] - kv_b.shape[2]
    return int(kv_b.shape[1] - (query.shape[2] - rope_dim))


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    kv_b_scale: torch.Tensor | None,
) -> None:
    shapes = tuple(query.shape), tuple(cache.shape), tuple(kv_b.shape)
    fits = query.dim() == cache.dim() == kv_b.dim() == 3 and query.shape[1] == kv_b.shape[0]
    if not fits or not 0 <= cache.shape[2] - kv_b.shape[2] <= query.shape[2]:
        raise ValueError(f"query, cache and kv_b do not fit together: {shapes}")
    if value_dim_of(query, cache, kv_b) < 1 or query.stride(2) != 1:
        raise ValueError(f"query, cache and kv_b leave no values, or gaps: {shapes}")
    check_operand("query", query, query.device, *FLOATS)
    check_operand("cache", cache, query.device, query.dtype)
    weight_dtype = query.dtype if kv_b_scale is None else torch.float8_e4m3fn
    check_operand("kv_b", kv_b, query.device, weight_dtype)


def _check_groups(query: torch.Tensor, cache: torch.Tensor, groups: Sequence[KeyGroup]) -> None:
    check_contiguous(cache=cache)
    for group in groups:
        last = group.spans[-1]  # they are in the order of their tokens
        if last.query + last.num_queries > len(query):
            raise ValueError(f"{last} does not fit {len(query)} tokens")
        check_ids("slots", group.slots, 0, cache.shape[0] * cache.shape[1])


def attend_groups(
    attend: Callable[..., None],
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    kv_b_scale: torch.Tensor | None,
    groups: Sequence[KeyGroup],
    out: torch.Tensor,
    scale: float,
) -> None:
    """Calls `attend` with the keys and values of each group, arguments as those of
    `attend_group_reference`."""
    rank = kv_b.shape[2]
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    flat = cache.view(-1, cache.shape[-1])
    for group in groups:
        latents = flat.index_select(0, group.slots)
        both = expand(latents[:, :rank], kv_b, kv_b_scale)
        attend(query, both, latents[:, rank:], group, out, lse, scale=scale)


def attend_group_reference(
    query: torch.Tensor,
    both: torch.Tensor,
    key_rope: torch.Tensor,
    group: KeyGroup,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
) -> None:
    """One span at a time; arguments as those of `kernels.attention.mla_prefill_triton.launch`."""
    value_dim = out.shape[2]
    for span in group.spans:
        of_queries = slice(span.query, span.query + span.num_queries)
        of_keys = slice(span.key, span.key + span.num_keys)
        nope, value = both[of_keys].split((both.shape[2] - value_dim, value_dim), dim=-1)
        shared = key_rope[of_keys, None].expand(-1, both.shape[1], -1)
        key = torch.cat((nope, shared), dim=-1).float()
        scores = torch.einsum("qhd,khd->qhk", query[of_queries].float(), key) * scale
        hidden = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool)
        hidden = hidden.triu_(span.shift + 1).unsqueeze(1).to(scores.device)
        scores.masked_fill_(hidden, float("-inf"))
        part_lse = scores.logsumexp(dim=-1)
        shares = (scores - part_lse.unsqueeze(-1)).exp().nan_to_num_()  # -inf - -inf: no key
        part = torch.einsum("qhk,khv->qhv", shares, value.float()).to(out.dtype)
        if not span.is_first:
            part, part_lse = merged(out[of_queries], lse[of_queries], part, part_lse)
        out[of_queries], lse[of_queries] = part, part_lse


def merged(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What two disjoint sets of keys gave: values a and b [T, heads, V], and the natural logarithms
    [T, heads] of their sums of exp(scores), -inf for no key -> of both sets together."""
    lse = torch.logaddexp(lse_a, lse_b)
    # Without any key the difference would be inf - inf.
    shift = torch.where(lse.isneginf(), 0.0, lse)
    out = a.float() * (lse_a - shift).exp().unsqueeze(-1)
    out += b.float() * (lse_b - shift).exp().unsqueeze(-1)
    return out.to(a.dtype), lse


def expand(
    latents: torch.Tensor, kv_b: torch.Tensor, kv_b_scale: torch.Tensor | None
) -> torch.Tensor:
    """[S, C], rows may be slices -> [S, heads, D + V]: keys without their rotated part, values."""
    weight = kv_b.flatten(0, 1)
    if kv_b_scale is None:
        both = linear(latents, weight)
    else:
        both = fp8_gemm(*quantise(latents), weight, kv_b_scale).to(latents.dtype)
    return both.view(len(latents), *kv_b.shape[:2])


def row_keys(
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    kv_b_scale: torch.Tensor | None,
    row: Row,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """key [heads, S, D + R] and value [heads, S, V] of one row."""
    num_heads, _, rank = kv_b.shape
    latents = cache.index_select(0, row.pages).flatten(0, 1)[: row.kv_length]
    both = expand(latents[:, :rank], kv_b, kv_b_scale)
    nope, value = both.split((both.shape[-1] - value_dim, value_dim), dim=-1)
    shared = latents[:, None, rank:].expand(-1, num_heads, -1)
    key = torch.cat((nope.transpose(0, 1), shared.transpose(0, 1)), dim=-1)
    return key, value.transpose(0, 1)


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """[heads, Q, V]. One block of queries at a time against the keys it may see: half the work
    of a masked whole, and several times faster on a CPU than the fused kernel of torch."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    query = query.float().contiguous()
    key, value = key.float().transpose(1, 2), value.float().contiguous()
    future = query.new_full((QUERY_BLOCK, QUERY_BLOCK), float("-inf")).triu_(1)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        count, seen = stop - start, num_keys - num_queries + stop
        scores = torch.bmm(query[:, start:stop], key[:, :, :seen]).mul_(scale)
        scores[:, :, seen - count :].add_(future[:count, :count])
        torch.bmm(scores.softmax(dim=-1), value[:, :seen], out=out[:, start:stop])
    return out
