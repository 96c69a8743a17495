"""Triton path of `rope_write`: programs of a token rotate a block of heads each, one more
writes the token's line of the cache.

A pair is loaded as one word, so that a thread's neighbouring pairs are one wide load.
"""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow

HEADS = 32
NUM_WARPS = 2


@triton.jit
def halves_of(words):
    """Real and imaginary parts, float32, of pairs: two bfloat16 in 32 bits, two float32 in 64."""
    if words.dtype == tl.int32:
        real, imaginary = words << 16, words & -65536
    else:
        real, imaginary = words.to(tl.int32), (words >> 32).to(tl.int32)
    return real.to(tl.float32, bitcast=True), imaginary.to(tl.float32, bitcast=True)


@triton.jit
def words_of(real, imaginary, narrow: tl.constexpr):
    """The reverse, rounded to bfloat16 if `narrow`."""
    if narrow:
        low = real.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = imaginary.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        words = low | (high << 16)
    else:
        low = real.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        words = low | (imaginary.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    return words


@triton.jit
def write_line(
    latent, latent_norm, key_rope, slots, cache, num_slots, token, cosine, sine, latent_stride,
    key_stride, latent_dim, eps,
    half: tl.constexpr, padded_half: tl.constexpr, padded_latent: tl.constexpr,
    has_norm: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + token)
    column = tl.arange(0, padded_latent)
    is_latent = column < latent_dim
    kept = tl.load(latent + token * latent_stride + column, mask=is_latent, other=0.0)
    pair = tl.arange(0, padded_half)
    key = key_rope + token * key_stride + 2 * pair
    real = tl.load(key, mask=pair < half, other=0.0).to(tl.float32)
    imaginary = tl.load(key + 1, mask=pair < half, other=0.0).to(tl.float32)
    if (slot >= 0) & (slot < num_slots):
        line = cache + slot * (latent_dim + 2 * half)
        if has_norm:
            wide = kept.to(tl.float32)
            mean = tl.sum(wide * wide, axis=0) / latent_dim
            factors = tl.load(latent_norm + column, mask=is_latent, other=0.0).to(tl.float32)
            kept = (wide * (1.0 / tl.sqrt_rn((mean + eps).to(tl.float32))) * factors).to(kept.dtype)
        tl.store(line + column, kept, mask=is_latent)
        goal = line + latent_dim + 2 * pair
        tl.store(goal, (real * cosine - imaginary * sine).to(kept.dtype), mask=pair < half)
        tl.store(goal + 1, (real * sine + imaginary * cosine).to(kept.dtype), mask=pair < half)


@triton.jit(do_not_specialize=["num_slots"])
def _rope_write(
    query, rotated, latent, latent_norm, key_rope, rotation, slots, cache, num_slots, num_heads,
    query_stride, query_head_stride, rotated_stride, rotated_head_stride,
    latent_stride, key_stride, latent_dim, eps,
    half: tl.constexpr, padded_half: tl.constexpr, heads: tl.constexpr, blocks: tl.constexpr,
    padded_latent: tl.constexpr, has_norm: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """Strides of queries in pairs, of latents and keys in elements."""
    follow(dependent)
    token = (tl.program_id(0) // (blocks + 1)).to(tl.int64)
    block = tl.program_id(0) % (blocks + 1)
    pair = tl.arange(0, padded_half)
    is_pair = pair < half
    cosine, sine = halves_of(tl.load(rotation + token * half + pair, mask=is_pair, other=0))
    if block == blocks:
        write_line(
            latent, latent_norm, key_rope, slots, cache, num_slots, token, cosine, sine,
            latent_stride, key_stride, latent_dim, eps, half, padded_half, padded_latent, has_norm,
        )  # fmt: skip
    else:
        head = block * heads + tl.arange(0, heads)
        inside = (head < num_heads)[:, None] & is_pair[None, :]
        source = query + token * query_stride + head[:, None] * query_head_stride
        words = tl.load(source + pair[None, :], mask=inside, other=0)
        real, imaginary = halves_of(words)
        turned_real = real * cosine[None, :] - imaginary * sine[None, :]
        turned_imaginary = real * sine[None, :] + imaginary * cosine[None, :]
        target = rotated + token * rotated_stride + head[:, None] * rotated_head_stride
        turned = words_of(turned_real, turned_imaginary, words.dtype == tl.int32)
        tl.store(target + pair[None, :], turned, mask=inside)


def launch(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    latent_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    rotated: torch.Tensor | None = None,
) -> None:
    """Queries begin at even addresses and have even strides, in elements."""
    num_tokens, num_heads, _ = query.shape
    if not num_tokens:
        return
    half, latent_dim = key_rope.shape[1] // 2, latent.shape[1]
    query_rope = query[..., -2 * half :]
    if rotated is None:
        rotated = query_rope
    assert query_rope.stride(2) == rotated.stride(2) == 1
    assert cache.is_contiguous()
    assert latent.stride(1) == key_rope.stride(1) == 1
    pairs = torch.int32 if query.element_size() == 2 else torch.int64
    query_pairs, rotated_pairs = query_rope.view(pairs), rotated.view(pairs)
    blocks, is_dependent = triton.cdiv(num_heads, HEADS), dependent(query)
    _rope_write[(num_tokens * (blocks + 1),)](
        query_pairs, rotated_pairs, latent, latent_norm, key_rope,
        torch.view_as_real(rotation).view(torch.int64), slots, cache,
        cache.shape[0] * cache.shape[1], num_heads,
        *query_pairs.stride()[:2], *rotated_pairs.stride()[:2],
        latent.stride(0), key_rope.stride(0), latent_dim, eps,
        half=half, padded_half=triton.next_power_of_2(half), heads=HEADS, blocks=blocks,
        padded_latent=triton.next_power_of_2(latent_dim), has_norm=latent_norm is not None,
        dependent=is_dependent, num_warps=NUM_WARPS, launch_pdl=is_dependent,
    )  # fmt: skip
