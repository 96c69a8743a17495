"""Puts the latents of new tokens into the paged KV cache.

cache[slots[t] // page_tokens, slots[t] % page_tokens] = (latent[t], key_rope[t])

cache     [pages, page_tokens, C + R]  contiguous, changed in place
slots     [T]     int64, page id * page_tokens + offset, no two alike
latent    [T, C]  normalised compressed KV, dtype of the cache
key_rope  [T, R]  rotated key, shared by all heads
"""

import torch


def write_latent(
    cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
) -> None:
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, torch.cat((latent, key_rope), dim=-1))
