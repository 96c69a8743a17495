"""Multi-head latent attention in absorbed form, over paged latents.

All heads share one key (the whole latent) and one value (its first C elements):

    p[t, h, :]    = softmax over s of (scale * query[t, h] . cache[s])   s: tokens t may see
    out[t, h, :]  = sum over s of p[t, h, s] * cache[s, :C]

    query   [T, heads, C + R]  kv_b already folded in, rotated part last
    cache   [pages, page_tokens, C + R]  one layer; finite everywhere, also where unused
    groups  of `kernels.paged_rows.group_rows`
    out     [T, heads, C]      dtype of query; scores and sums in float32
"""

from collections.abc import Sequence

import torch

from kernels.paged_rows import RowGroup


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    groups: Sequence[RowGroup],
    *,
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    if len(groups) == 1 and groups[0].tokens is None:
        return attend(query, cache, groups[0], value_dim, scale)
    out = query.new_zeros(*query.shape[:2], value_dim)
    for group in groups:
        assert group.tokens is not None
        part = attend(query.index_select(0, group.tokens), cache, group, value_dim, scale)
        out.index_copy_(0, group.tokens, part)
    return out


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
