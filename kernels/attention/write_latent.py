"""Puts the latents of new tokens into the paged KV cache.

cache[slots[t] // page_tokens, slots[t] % page_tokens] = (latent[t], key_rope[t])

cache     [pages, page_tokens, C + R]  contiguous, changed in place
slots     [T]     int64, page id * page_tokens + offset, no two alike
latent    [T, C]  normalised compressed KV, dtype of the cache
key_rope  [T, R]  rotated key, shared by all heads
"""

import torch

from kernels.build.operands import check_contiguous, check_ids, check_operand, check_shape


def write_latent(
    cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
) -> None:
    """Raises ValueError for arguments that do not fit, and on a CPU for slots of no page."""
    if cache.dim() != 3 or latent.dim() != 2:
        raise ValueError(f"cache {tuple(cache.shape)} does not fit {tuple(latent.shape)}")
    num_tokens, latent_dim = latent.shape
    check_operand("slots", slots, cache.device, torch.int64)
    check_operand("latent", latent, cache.device, cache.dtype)
    check_operand("key_rope", key_rope, cache.device, cache.dtype)
    check_shape("slots", slots, num_tokens)
    check_shape("key_rope", key_rope, num_tokens, cache.shape[2] - latent_dim)
    check_contiguous(cache=cache)
    check_ids("slots", slots, 0, cache.shape[0] * cache.shape[1])
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, torch.cat((latent, key_rope), dim=-1))
