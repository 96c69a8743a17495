"""The two ends of absorbed attention: a product per head, with what is beside and behind it.

    absorb_query:   out[t, h] = (query[t, h, :D] @ kv_b[h, :D], query[t, h, D:] rotated)
                    and new latents go into the cache, as `kernels.rope_write` says
    absorb_values:  (latents[t, h] @ kv_b[h, D:]^T), heads side by side, as `kernels.quantise` gives
                    them

    query    [T, heads, D + R]  bfloat16 or float32, contiguous; rotated part last
    kv_b     [heads, D + V, C]  same dtype, contiguous
    latents  [T, heads, C]      same dtype, contiguous
    out      [T, heads, C + R]  same dtype
    latent, key_rope, rotation, slots, cache, latent_norm, eps   as for `kernels.rope_write`

The Triton path needs bfloat16 with D, C and V that are multiples of 64, for `absorb_values`
V = 128: one group a head. Products are summed in float32 and, where they are quantised, not rounded
to bfloat16 before; both are within 1e-2 of float32, relative by norm (quantised: 4e-2).
"""

import torch

from kernels.head_linear import head_linear
from kernels.paths import path_of
from kernels.quantise import GROUP, quantise
from kernels.rope_write import rope_write


def absorb_query(
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
) -> torch.Tensor:
    """[T, heads, C + R]; changes `cache`."""
    rope_dim = key_rope.shape[1]
    nope_dim, latent_dim = query.shape[2] - rope_dim, kv_b.shape[2]
    if _has_kernel(query, nope_dim, latent_dim):
        from kernels.absorb_triton import launch_query

        return launch_query(
            query, kv_b, latent, key_rope, rotation, slots, cache,
            latent_norm=latent_norm, eps=eps,
        )  # fmt: skip
    out = query.new_empty(*query.shape[:2], latent_dim + rope_dim)
    rope_write(
        query, latent, key_rope, rotation, slots, cache,
        latent_norm=latent_norm, eps=eps, rotated=out[..., latent_dim:],
    )  # fmt: skip
    weight = kv_b[:, :nope_dim].transpose(1, 2)
    head_linear(query[..., :nope_dim], weight, out=out[..., :latent_dim])
    return out


def absorb_values(
    latents: torch.Tensor, kv_b: torch.Tensor, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, heads * V] float8_e4m3fn, [T, heads * V / 128] float32)."""
    if _has_kernel(latents, kv_b.shape[2], kv_b.shape[1]) and kv_b.shape[1] - nope_dim == GROUP:
        from kernels.absorb_triton import launch_values

        return launch_values(latents, kv_b, nope_dim)
    values = latents.new_empty(*latents.shape[:2], kv_b.shape[1] - nope_dim)
    return quantise(head_linear(latents, kv_b[:, nope_dim:], out=values).flatten(1))


def _has_kernel(x: torch.Tensor, *sizes: int) -> bool:
    is_half = x.dtype == torch.bfloat16
    return path_of("absorb", x.device) == "triton" and is_half and not any(n % 64 for n in sizes)
