"""Rotates queries and the shared key, and writes latent and key into the paged cache: one kernel.

    rotated[t, h, :]                        = query[t, h, D:] rotated by rotation[t]
    cache[slots[t] // P, slots[t] % P]      = (norm(latent[t]), key_rope[t] rotated by rotation[t])

    query     [T, heads, D + R]  bfloat16 or float32, pairs interleaved as in `rope`
    rotated   [T, heads, R]  same dtype, may be a slice; None: query's own, in place
    latent    [T, C]     compressed KV, same dtype; rows may be slices of longer ones
    latent_norm  [C]     weight of the RMSNorm, with `eps`, that is still to do; None: it is done
    key_rope  [T, R]     as `latent`
    rotation  [T, R / 2] complex64
    slots     [T] int64, page id * page tokens + offset, no two alike; -1: not written. On a device
              the host does not read them, and those of no page are not written
    cache     [pages, page_tokens, C + R]  same dtype, contiguous, changed in place

Computed in float32; the Triton path agrees with the reference within one bit of the last place,
latents without a norm are copies.
"""

import torch

from kernels.build.operands import FLOATS, check_contiguous, check_ids, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.rms_norm import norm_reference


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
    """Raises ValueError for arguments that do not fit, and on a CPU for slots of no page."""
    check_tokens(query, latent, key_rope, rotation, slots, cache, latent_norm)
    if rotated is not None:
        shape = (*query.shape[:2], key_rope.shape[1])
        check_operand("rotated", rotated, query.device, query.dtype, shape=shape)
    write = rope_write_reference
    if path_of("rope_write", query.device) == "triton":
        from kernels.attention.rope_write_triton import launch

        write = launch
    given = query, latent, key_rope, rotation, slots, cache
    write(*given, latent_norm=latent_norm, eps=eps, rotated=rotated)


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
        latent = norm_reference(latent, None, latent_norm, eps)[0]
    key_rope, num_slots = both[:, -1], cache.shape[0] * cache.shape[1]
    is_kept = (slots >= 0) & (slots < num_slots)
    if not is_kept.all():
        slots, latent, key_rope = slots[is_kept], latent[is_kept], key_rope[is_kept]
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, torch.cat((latent, key_rope), dim=-1))


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [T, heads, R] float32 or bfloat16, of pairs (x[2i], x[2i + 1]) that lie side by side as in
    DeepSeek's checkpoints, each times rotation [T, R / 2] complex64: exp(j * position * frequency),
    times a common factor. Computed in float32. Raises ValueError for what does not fit."""
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"x must be [T, heads, R] with R even, is {list(x.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    shape = (len(x), x.shape[2] // 2)
    check_operand("rotation", rotation, x.device, torch.complex64, shape=shape)
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
    rotated = torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2)
    return rotated.to(x.dtype)


def check_tokens(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    latent_norm: torch.Tensor | None,
) -> None:
    """Raises ValueError for arguments of `rope_write` that do not fit."""
    if query.dim() != 3 or latent.dim() != 2 or key_rope.dim() != 2 or cache.dim() != 3:
        shapes = [tuple(each.shape) for each in (query, latent, key_rope, cache)]
        raise ValueError(f"query, latent, key_rope and cache do not fit together: {shapes}")
    num_tokens, latent_dim = latent.shape
    rope_dim = key_rope.shape[1]
    if len(query) != num_tokens or query.shape[2] < rope_dim or rope_dim % 2:
        raise ValueError(f"query {tuple(query.shape)} does not fit {tuple(key_rope.shape)}")
    if latent.stride(1) != 1 or key_rope.stride(1) != 1:
        raise ValueError("the columns of latent and of key_rope must be contiguous")
    device, dtype = query.device, query.dtype
    check_operand("query", query, device, *FLOATS)
    check_operand("latent", latent, device, dtype)
    shape = (num_tokens, cache.shape[2] - latent_dim)
    check_operand("key_rope", key_rope, device, dtype, shape=shape)
    check_operand("cache", cache, device, dtype)
    shape = (num_tokens, rope_dim // 2)
    check_operand("rotation", rotation, device, torch.complex64, shape=shape)
    check_operand("slots", slots, device, torch.int64, shape=(num_tokens,))
    check_contiguous(rotation=rotation, slots=slots, cache=cache)
    if latent_norm is not None:
        check_operand("latent_norm", latent_norm, device, dtype, shape=(latent_dim,))
        check_contiguous(latent_norm=latent_norm)
    check_ids("slots", slots, -1, cache.shape[0] * cache.shape[1])
