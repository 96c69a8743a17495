"""Rotates queries and the shared key, and writes latent and key into the paged cache: one kernel.

    rotated[t, h, :]                        = query[t, h, D:] rotated by rotation[t]
    cache[slots[t] // P, slots[t] % P]      = (norm(latent[t]), key_rope[t] rotated by rotation[t])

    query     [T, heads, D + R]  bfloat16 or float32, pairs interleaved as in `kernels.rope`
    rotated   [T, heads, R]  same dtype, may be a slice; None: query's own, in place
    latent    [T, C]     compressed KV, same dtype; rows may be slices of longer ones
    latent_norm  [C]     weight of the RMSNorm, with `eps`, that is still to do; None: it is done
    key_rope  [T, R]     as `latent`
    rotation  [T, R / 2] complex64
    slots     [T] int64, page id * page tokens + offset, no two alike; -1: not written
    cache     [pages, page_tokens, C + R]  same dtype, contiguous, changed in place

Computed in float32; the Triton path agrees with the reference within one bit of the last place,
latents without a norm are copies.
"""

import torch

from kernels.paths import path_of
from kernels.rms_norm import rms_norm_reference
from kernels.rope import rope
from kernels.write_latent import write_latent


def rope_write(
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
    write = rope_write_reference
    if path_of("rope_write", query.device) == "triton":
        from kernels.rope_write_triton import launch

        write = launch
    write(
        query,
        latent,
        key_rope,
        rotation,
        slots,
        cache,
        latent_norm=latent_norm,
        eps=eps,
        rotated=rotated,
    )


def rope_write_reference(
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
    query_rope = query[..., -key_rope.shape[1] :]
    # The key is rotated as one more head.
    both = rope(torch.cat((query_rope, key_rope.unsqueeze(1)), dim=1), rotation)
    (query_rope if rotated is None else rotated).copy_(both[:, :-1])
    if latent_norm is not None:
        latent = rms_norm_reference(latent, latent_norm, eps)
    key_rope, is_kept = both[:, -1], slots >= 0
    if not is_kept.all():
        slots, latent, key_rope = slots[is_kept], latent[is_kept], key_rope[is_kept]
    write_latent(cache, slots, latent, key_rope)
