"""Triton path of `kernels.rope_write`: a program a token and block of heads; those of block 0 write
the token's line of the cache."""

import torch
import triton
import triton.language as tl

HEADS = 16


@triton.jit
def _rotate(pairs, turn):
    """[N, R / 2, 2] pairs turned by [R / 2, 2], in float32."""
    real, imaginary = tl.split(pairs.to(tl.float32))
    cosine, sine = tl.split(turn)
    turned_real = real * cosine[None, :] - imaginary * sine[None, :]
    turned_imaginary = real * sine[None, :] + imaginary * cosine[None, :]
    return tl.join(turned_real, turned_imaginary)


@triton.jit
def _rope_write(
    query, rotated, latent, latent_norm, key_rope, rotation, slots, cache, num_heads,
    query_stride, query_head_stride, rotated_stride, rotated_head_stride,
    latent_stride, key_stride, latent_dim, eps,
    half: tl.constexpr, padded_half: tl.constexpr, heads: tl.constexpr,
    padded_latent: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, padded_half)[:, None]
    element = 2 * pair + tl.arange(0, 2)[None, :]
    real = pair + tl.zeros_like(element) < half
    turn = tl.load(rotation + token * 2 * half + element, mask=real, other=0.0)

    head = tl.program_id(1) * heads + tl.arange(0, heads)
    inside = (head < num_heads)[:, None, None] & real[None, :, :]
    source = query + token * query_stride + head[:, None, None] * query_head_stride
    pairs = tl.load(source + element[None, :, :], mask=inside, other=0.0)
    target = rotated + token * rotated_stride + head[:, None, None] * rotated_head_stride
    tl.store(target + element[None, :, :], _rotate(pairs, turn).to(pairs.dtype), mask=inside)

    slot = tl.load(slots + token)
    if (tl.program_id(1) == 0) & (slot >= 0):
        line = cache + slot * (latent_dim + 2 * half)
        column = tl.arange(0, padded_latent)
        is_latent = column < latent_dim
        kept = tl.load(latent + token * latent_stride + column, mask=is_latent, other=0.0)
        if has_norm:
            wide = kept.to(tl.float32)
            mean = tl.sum(wide * wide, axis=0) / latent_dim
            factors = tl.load(latent_norm + column, mask=is_latent, other=0.0).to(tl.float32)
            kept = (wide * (1.0 / tl.sqrt_rn(mean + eps)) * factors).to(kept.dtype)
        tl.store(line + column, kept, mask=is_latent)
        key = tl.load(key_rope + token * key_stride + element, mask=real, other=0.0)
        turned = _rotate(key[None, :, :], turn).to(key.dtype)
        tl.store(line + latent_dim + element[None, :, :], turned, mask=real[None, :, :])


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
    _rope_write[num_tokens, triton.cdiv(num_heads, HEADS)](
        query_rope, rotated, latent, latent_norm, key_rope, torch.view_as_real(rotation), slots,
        cache, num_heads, *query_rope.stride()[:2], *rotated.stride()[:2],
        latent.stride(0), key_rope.stride(0), latent_dim, eps,
        half=half, padded_half=triton.next_power_of_2(half), heads=HEADS,
        padded_latent=triton.next_power_of_2(latent_dim), has_norm=latent_norm is not None,
        num_warps=4,
    )  # fmt: skip
