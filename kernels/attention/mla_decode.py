"""Multi-head latent attention in absorbed form, over paged latents.

All heads share one key (the whole latent) and one value (its first C elements):

    p[t, h, :]    = softmax over s of (scale * query[t, h] . cache[s])   s: tokens t may see
    out[t, h, :]  = sum over s of p[t, h, s] * cache[s, :C]

    query   [T, heads, C + R]  kv_b already folded in, rotated part last
    cache   [pages, page_tokens, C + R]  one layer; finite everywhere, also where unused
    groups  of `kernels.attention.paged_rows.group_rows`
    out     [T, heads, C]      dtype of query; scores and sums in float32

`mla_decode_paged` takes rows as they are in a batch, all with the same number of new tokens:

    block_table  [B, P] int32, page ids in token order; on a device not checked
    kv_lengths   [B] int32, new tokens included; 0: a row without any, whose out is zeros

In bfloat16 all paths are within 1e-2 of the float32 reference, relative by norm. Ours for Hopper
leaves splits, which `absorb` joins as it multiplies them, or `mla_decode_paged` before.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.attention import mla_decode_cuda
from kernels.attention.mla_decode_splits import MAX_QUERIES, Splits
from kernels.attention.paged_rows import RowGroup, group_rows
from kernels.build.operands import FLOATS, check_contiguous, check_ids, check_operand
from kernels.build.paths import best_path, note

MAX_ROWS = 128  # of one new token each, up to which our kernel is faster than FlashMLA


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    groups: Sequence[RowGroup],
    *,
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, and on a CPU for pages of no cache."""
    _check(query, cache, value_dim)
    for group in groups:
        check_ids("pages", group.pages, 0, len(cache))
    note("mla_decode", "reference")
    if len(groups) == 1 and groups[0].tokens is None:
        return attend(query, cache, groups[0], value_dim, scale)
    out = query.new_zeros(*query.shape[:2], value_dim)
    for group in groups:
        assert group.tokens is not None
        part = attend(query.index_select(0, group.tokens), cache, group, value_dim, scale)
        out.index_copy_(0, group.tokens, part)
    return out


def mla_decode_paged(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
    schedule: object | None = None,
) -> torch.Tensor:
    """Raises ValueError unless T is 1 to 256 times B, for other arguments that do not fit, and on a
    CPU for pages that there are not. `schedule` is what `mla_decode_schedule` made
    for all layers of a step; without it each call makes its own."""
    given = query, cache, block_table, kv_lengths
    found = mla_decode_splits(*given, value_dim=value_dim, scale=scale, schedule=schedule)
    if isinstance(found, Splits):
        from kernels.attention.mla_decode_triton import join_splits

        return join_splits(found)
    return found


def mla_decode_splits(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
    schedule: object | None = None,
) -> torch.Tensor | Splits:
    """As `mla_decode_paged`, but not joined where the path leaves splits."""
    _check(query, cache, value_dim)
    _check_rows(query, block_table, kv_lengths)
    given = query, cache, block_table, kv_lengths
    path = note("mla_decode", path_for(query, cache, value_dim, num_rows=len(kv_lengths)))
    if path == "flash_mla":
        from kernels.attention import mla_decode_flash

        if not isinstance(schedule, mla_decode_flash.Schedule):
            num_queries = len(query) // len(kv_lengths)
            schedule = mla_decode_flash.Schedule(kv_lengths, num_queries, query.shape[1])
        return mla_decode_flash.launch(*given, schedule, scale=scale)
    if path == "cuda":
        return mla_decode_cuda.launch(*given, scale=scale)
    if path == "triton":
        from kernels.attention.mla_decode_triton import launch

        return launch(*given, value_dim=value_dim, scale=scale)[0]
    return mla_decode_reference(*given, value_dim=value_dim, scale=scale)


def path_for(query: torch.Tensor, cache: torch.Tensor, value_dim: int, *, num_rows: int) -> str:
    """The path of `mla_decode_splits`."""
    path = best_path("mla_decode", query.device)
    if path == "reference":
        return path
    num_queries = len(query) // max(1, num_rows)
    if path == "flash_mla" and len(query) and not is_ours(num_rows, num_queries):
        from kernels.attention import mla_decode_flash

        if mla_decode_flash.suits(query, cache, value_dim, num_queries):
            return path
    return "cuda" if mla_decode_cuda.takes(query, cache, value_dim) else "triton"


def mla_decode_schedule(
    kv_lengths: torch.Tensor, *, num_queries: int, num_heads: int
) -> object | None:
    """What the calls of one step share that differ in query and cache only. Made on the device;
    None where a path needs none: where FlashMLA is not taken."""
    is_flash = best_path("mla_decode", kv_lengths.device) == "flash_mla"
    if not is_flash or is_ours(len(kv_lengths), num_queries):
        return None
    from kernels.attention.mla_decode_flash import Schedule

    return Schedule(kv_lengths, num_queries, num_heads)


def is_ours(num_rows: int, num_queries: int) -> bool:
    """Whether so many rows with so many new tokens each are not for FlashMLA."""
    return num_queries == 1 and num_rows <= MAX_ROWS and mla_decode_cuda.is_built()


def mla_decode_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    num_queries = len(query) // max(1, len(kv_lengths))
    counts = torch.where(kv_lengths > 0, num_queries, 0)
    starts = F.pad(counts.cumsum(0), (1, 0))
    groups = group_rows(starts, kv_lengths, block_table, cache.shape[1])
    is_used = (kv_lengths > 0).repeat_interleave(num_queries)
    out = query.new_zeros(*query.shape[:2], value_dim)
    out[is_used] = mla_decode(query[is_used], cache, groups, value_dim=value_dim, scale=scale)
    return out


def _check(query: torch.Tensor, cache: torch.Tensor, value_dim: int) -> None:
    if query.dim() != 3 or cache.dim() != 3 or query.shape[2] != cache.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} does not fit {tuple(cache.shape)}")
    if not 0 < value_dim <= query.shape[2]:
        raise ValueError(f"values are {value_dim} of {query.shape[2]} elements")
    check_operand("query", query, query.device, *FLOATS)
    check_operand("cache", cache, query.device, query.dtype)
    check_contiguous(cache=cache)


def _check_rows(query: torch.Tensor, block_table: torch.Tensor, kv_lengths: torch.Tensor) -> None:
    check_operand("block_table", block_table, query.device, torch.int32)
    check_operand("kv_lengths", kv_lengths, query.device, torch.int32)
    if block_table.dim() != 2 or kv_lengths.shape != block_table.shape[:1]:
        shapes = tuple(block_table.shape), tuple(kv_lengths.shape)
        raise ValueError(f"block_table and kv_lengths do not fit together: {shapes}")
    num_tokens, num_rows = len(query), len(kv_lengths)
    if num_tokens % max(1, num_rows) or num_tokens > MAX_QUERIES * num_rows:
        raise ValueError(f"{num_tokens} tokens are not up to {MAX_QUERIES} for {num_rows} rows")
    if block_table.stride(1) != 1:
        raise ValueError("the columns of block_table must be contiguous")
    check_contiguous(kv_lengths=kv_lengths)


def attend(
    query: torch.Tensor, cache: torch.Tensor, group: RowGroup, value_dim: int, scale: float
) -> torch.Tensor:
    num_heads, width = query.shape[1:]
    num_rows, num_queries, length = group.mask.shape
    latents = cache.index_select(0, group.pages).view(num_rows, length, width).float()
    mask = group.mask
    if num_queries > 1:
        mask = mask.repeat_interleave(num_heads, dim=1)
    stacked = query.reshape(num_rows, num_queries * num_heads, width).float()
    scores = torch.baddbmm(mask, stacked, latents.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(dim=-1), latents[..., :value_dim])
    return out.view(-1, num_heads, value_dim).to(query.dtype)
