"""Rotates queries and the shared key, and writes latent and key into the paged cache: one kernel.

    query[t, h, D:]                         rotated in place by rotation[t]
    cache[slots[t] // P, slots[t] % P]      = (latent[t], key_rope[t] rotated by rotation[t])

    query     [T, heads, D + R]  bfloat16 or float32, pairs interleaved as in `kernels.rope`
    latent    [T, C]     normalised compressed KV, same dtype; rows may be slices of longer ones
    key_rope  [T, R]     as `latent`
    rotation  [T, R / 2] complex64
    slots     [T] int64, page id * page tokens + offset, no two alike
    cache     [pages, page_tokens, C + R]  same dtype, contiguous, changed in place

Computed in float32; the Triton path agrees with the reference within one bit of the last place, the
latents are copies.
"""

import torch

from kernels.paths import path_of
from kernels.rope import rope
from kernels.write_latent import write_latent


def rope_write(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    if path_of("rope_write", query.device) == "triton":
        from kernels.rope_write_triton import launch

        launch(query, latent, key_rope, rotation, slots, cache)
    else:
        rope_write_reference(query, latent, key_rope, rotation, slots, cache)


def rope_write_reference(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    rotated = query[..., -key_rope.shape[1] :]
    # The key is rotated as one more head.
    both = rope(torch.cat((rotated, key_rope.unsqueeze(1)), dim=1), rotation)
    rotated.copy_(both[:, :-1])
    write_latent(cache, slots, latent, both[:, -1])
