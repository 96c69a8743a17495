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
    query, latent, key_rope, rotation, slots, cache, num_heads, head_dim, query_stride,
    latent_stride, key_stride, latent_dim,
    half: tl.constexpr, padded_half: tl.constexpr, heads: tl.constexpr,
    padded_latent: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, padded_half)[:, None]
    element = 2 * pair + tl.arange(0, 2)[None, :]
    real = pair + tl.zeros_like(element) < half
    turn = tl.load(rotation + token * 2 * half + element, mask=real, other=0.0)

    head = tl.program_id(1) * heads + tl.arange(0, heads)
    place = query + token * query_stride + head[:, None, None] * head_dim + head_dim - 2 * half
    place = place + element[None, :, :]
    inside = (head < num_heads)[:, None, None] & real[None, :, :]
    pairs = tl.load(place, mask=inside, other=0.0)
    tl.store(place, _rotate(pairs, turn).to(pairs.dtype), mask=inside)

    if tl.program_id(1) == 0:
        line = cache + tl.load(slots + token) * (latent_dim + 2 * half)
        column = tl.arange(0, padded_latent)
        kept = tl.load(latent + token * latent_stride + column, mask=column < latent_dim)
        tl.store(line + column, kept, mask=column < latent_dim)
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
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    if not num_tokens:
        return
    half, latent_dim = key_rope.shape[1] // 2, latent.shape[1]
    assert query.stride()[1:] == (head_dim, 1), query.stride()
    assert cache.is_contiguous()
    assert latent.stride(1) == key_rope.stride(1) == 1
    _rope_write[num_tokens, triton.cdiv(num_heads, HEADS)](
        query, latent, key_rope, torch.view_as_real(rotation), slots, cache, num_heads, head_dim,
        query.stride(0), latent.stride(0), key_rope.stride(0), latent_dim,
        half=half, padded_half=triton.next_power_of_2(half), heads=HEADS,
        padded_latent=triton.next_power_of_2(latent_dim), num_warps=4,
    )  # fmt: skip
