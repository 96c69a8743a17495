"""Triton paths of `kernels.absorb`: a program a head, block of tokens and, for queries, block of
columns."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quantise import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.quantise_triton import quantise_group


class QueryShape(NamedTuple):
    """Tokens and columns a program."""

    tokens: int
    columns: int
    num_warps: int


class ValueShape(NamedTuple):
    """Tokens a program, summands a step of its pipeline."""

    tokens: int
    block_k: int
    num_warps: int
    num_stages: int


def query_shape(num_tokens: int) -> QueryShape:
    tokens = min(64, max(16, triton.next_power_of_2(num_tokens)))
    return QueryShape(tokens, 128, 4)


def value_shape(num_tokens: int) -> ValueShape:
    tokens = min(64, max(16, triton.next_power_of_2(num_tokens)))
    return ValueShape(tokens, 64, 4, 4)


@triton.jit
def _rotated(pairs, cosine, sine, rows: tl.constexpr, half: tl.constexpr):
    """[rows, 2 half] with pairs side by side, turned in float32 by [rows, half]."""
    real, imaginary = tl.split(tl.reshape(pairs.to(tl.float32), [rows, half, 2]))
    turned = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return tl.reshape(turned, [rows, 2 * half])


@triton.jit
def _absorb_query(
    query, kv_b, latent, latent_norm, key_rope, rotation, slots, cache, out,
    num_tokens, num_heads, kv_b_head_stride, latent_stride, key_stride, eps,
    nope_dim: tl.constexpr, padded_nope: tl.constexpr, half: tl.constexpr,
    latent_dim: tl.constexpr, padded_latent: tl.constexpr,
    tokens: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    head, begin = tl.program_id(0), tl.program_id(1) * tokens
    token = begin + tl.arange(0, tokens)
    is_token = token < num_tokens
    nope, rope = tl.arange(0, padded_nope), tl.arange(0, 2 * half)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    line = token.to(tl.int64) * num_heads + head
    source = query + line[:, None] * (nope_dim + 2 * half)
    inside = is_token[:, None] & (nope < nope_dim)[None, :]
    x = tl.load(source + nope[None, :], mask=inside, other=0.0)
    weight = kv_b + head.to(tl.int64) * kv_b_head_stride + nope[:, None] * latent_dim
    is_weight = (nope < nope_dim)[:, None] & (column < latent_dim)[None, :]
    w = tl.load(weight + column[None, :], mask=is_weight, other=0.0)
    goal = out + line[:, None] * (latent_dim + 2 * half)
    folded = tl.dot(x, w).to(x.dtype)
    tl.store(
        goal + column[None, :], folded, mask=is_token[:, None] & (column < latent_dim)[None, :]
    )
    if tl.program_id(2) == 0:
        pair = tl.arange(0, half)
        turn = rotation + token[:, None] * (2 * half) + 2 * pair[None, :]
        cosine = tl.load(turn, mask=is_token[:, None], other=0.0)
        sine = tl.load(turn + 1, mask=is_token[:, None], other=0.0)
        pairs = tl.load(source + nope_dim + rope[None, :], mask=is_token[:, None], other=0.0)
        turned = _rotated(pairs, cosine, sine, tokens, half).to(pairs.dtype)
        tl.store(goal + latent_dim + rope[None, :], turned, mask=is_token[:, None])
    elif tl.program_id(2) == 1:
        # The block's lines of the cache, shared among the heads.
        for index in range(head, tl.minimum(tokens, num_tokens - begin), num_heads):
            _write_line(
                latent, latent_norm, key_rope, rotation, slots, cache, begin + index,
                latent_stride, key_stride, eps, half, latent_dim, padded_latent,
            )  # fmt: skip


@triton.jit
def _write_line(
    latent, latent_norm, key_rope, rotation, slots, cache, token, latent_stride, key_stride, eps,
    half: tl.constexpr, latent_dim: tl.constexpr, padded_latent: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + token)
    if slot >= 0:
        line = cache + slot * (latent_dim + 2 * half)
        column, pair = tl.arange(0, padded_latent), tl.arange(0, half)
        is_latent = column < latent_dim
        wide = tl.load(latent + token * latent_stride + column, mask=is_latent, other=0.0)
        wide = wide.to(tl.float32)
        mean = tl.sum(wide * wide, axis=0) / latent_dim
        factors = tl.load(latent_norm + column, mask=is_latent, other=0.0).to(tl.float32)
        normed = wide * (1.0 / tl.sqrt_rn((mean + eps).to(tl.float32))) * factors
        tl.store(line + column, normed.to(cache.dtype.element_ty), mask=is_latent)
        turn = rotation + token * (2 * half) + 2 * pair
        cosine, sine = tl.load(turn), tl.load(turn + 1)
        key = key_rope + token * key_stride + 2 * pair
        real, imaginary = tl.load(key).to(tl.float32), tl.load(key + 1).to(tl.float32)
        place = line + latent_dim + 2 * pair
        tl.store(place, (real * cosine - imaginary * sine).to(cache.dtype.element_ty))
        tl.store(place + 1, (real * sine + imaginary * cosine).to(cache.dtype.element_ty))


def launch_query(
    query: torch.Tensor,
    kv_b: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    latent_norm: torch.Tensor,
    eps: float,
    shape: QueryShape | None = None,
) -> torch.Tensor:
    """`shape`: another one than that of the number of tokens, to measure it."""
    num_tokens, num_heads, width = query.shape
    rope_dim, latent_dim = key_rope.shape[1], kv_b.shape[2]
    nope_dim = width - rope_dim
    out = query.new_empty(num_tokens, num_heads, latent_dim + rope_dim)
    if not num_tokens:
        return out
    assert query.is_contiguous()
    assert cache.is_contiguous()
    assert kv_b.stride(2) == latent.stride(1) == key_rope.stride(1) == 1
    assert kv_b.stride(1) == latent_dim
    shape = shape or query_shape(num_tokens)
    # Lines of the cache are for the second block of columns.
    num_blocks = max(2, triton.cdiv(latent_dim, shape.columns))
    _absorb_query[num_heads, triton.cdiv(num_tokens, shape.tokens), num_blocks](
        query, kv_b, latent, latent_norm, key_rope, torch.view_as_real(rotation), slots, cache, out,
        num_tokens, num_heads, kv_b.stride(0), latent.stride(0), key_rope.stride(0), eps,
        nope_dim=nope_dim, padded_nope=triton.next_power_of_2(nope_dim), half=rope_dim // 2,
        latent_dim=latent_dim, padded_latent=triton.next_power_of_2(latent_dim),
        tokens=shape.tokens, columns=shape.columns, num_warps=shape.num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _absorb_values(
    latents, weight, out, scale, num_tokens, num_heads, weight_head_stride, scale_stride,
    latent_dim: tl.constexpr, group: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    tokens: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * tokens + tl.arange(0, tokens)
    is_token = token < num_tokens
    column, index = tl.arange(0, group), tl.arange(0, block_k)
    x_line = latents + (token.to(tl.int64) * num_heads + head)[:, None] * latent_dim
    w_line = weight + head.to(tl.int64) * weight_head_stride + column[None, :] * latent_dim
    total = tl.zeros([tokens, group], tl.float32)
    for first in range(0, latent_dim, block_k):
        x = tl.load(x_line + first + index[None, :], mask=is_token[:, None], other=0.0)
        w = tl.load(w_line + first + index[:, None])
        total = tl.dot(x, w, total)
    values, factor = quantise_group(total, largest, smallest)
    place = token.to(tl.int64)[:, None] * (num_heads * group) + head * group + column[None, :]
    tl.store(out + place, values, mask=is_token[:, None])
    tl.store(scale + head.to(tl.int64) * scale_stride + token, factor, mask=is_token)


def launch_values(
    latents: torch.Tensor,
    kv_b: torch.Tensor,
    nope_dim: int,
    *,
    shape: ValueShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`shape` as for `launch_query`."""
    num_tokens, num_heads, latent_dim = latents.shape
    out = latents.new_empty(num_tokens, num_heads * GROUP, dtype=torch.float8_e4m3fn)
    scale = empty_scales(out)
    if not num_tokens:
        return out, scale
    weight = kv_b[:, nope_dim:]
    assert weight.shape[1] == GROUP
    assert latents.is_contiguous()
    assert weight.stride(2) == 1
    assert weight.stride(1) == latent_dim
    shape = shape or value_shape(num_tokens)
    _absorb_values[num_heads, triton.cdiv(num_tokens, shape.tokens)](
        latents, weight, out, scale, num_tokens, num_heads, weight.stride(0), scale.stride(1),
        latent_dim=latent_dim, group=GROUP, largest=LARGEST, smallest=SMALLEST,
        tokens=shape.tokens, block_k=shape.block_k, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip
    return out, scale
