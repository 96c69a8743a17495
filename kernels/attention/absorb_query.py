"""The beginning of absorbed attention: one kernel makes the query and writes the cache.

    absorbed[t, h, :C]                      = query[t, h, :D] @ kv_b[h, :D]
    absorbed[t, h, C:]                      = query[t, h, D:] rotated by rotation[t]
    cache[slots[t] // P, slots[t] % P]      = (norm(latent[t]), key_rope[t] rotated by rotation[t])

    query     [T, heads, D + R]  bfloat16 or float32, contiguous
    kv_b      [heads, D + V, C]  same dtype, contiguous
    absorbed  [T, heads, C + R]  same dtype
    latent, key_rope, rotation, slots, cache, latent_norm, eps  as for `rope_write`

The Triton path is for up to MAX_TOKENS in bfloat16, D and C powers of two from 128 on; in parts
it is `rope_write` and `head_linear`. Products are within TOLERANCE of the
reference, relative by norm; the rest is as in `kernels.attention.rope_write`.
"""

import torch

from kernels.attention.rope_write import check_tokens, rope_write
from kernels.build.operands import check_contiguous, check_operand
from kernels.build.paths import best_path, note
from kernels.gemm.head_linear import head_linear

TOLERANCE = 5e-3
MAX_TOKENS = 128  # of one launch


def absorb_query(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    latent_norm: torch.Tensor,
    eps: float,
    leads: bool = False,
) -> torch.Tensor:
    """absorbed; changes `cache`. `leads`: the kernel after it may begin before it ends. FlashMLA's
    must not: it is launched as one that may, and reads queries before it waits.
    Raises ValueError for arguments that do not fit, and on a CPU for slots of no page."""
    given = (query, latent, key_rope, rotation, slots, cache)
    check_tokens(*given, latent_norm)
    _check_weight(query, latent, key_rope, kv_b)
    if note("absorb", path_for(query, key_rope, kv_b)) == "triton":
        from kernels.attention.absorb_query_triton import launch

        return launch(*given, kv_b, latent_norm=latent_norm, eps=eps, leads=leads)
    return absorb_query_in_parts(*given, kv_b, latent_norm=latent_norm, eps=eps)


def absorb_query_in_parts(
    query: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    latent_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`absorb_query` by the operations of its parts."""
    latent_dim, rope_dim = kv_b.shape[2], key_rope.shape[1]
    nope_dim = query.shape[2] - rope_dim
    # Both parts are written where they belong.
    absorbed = query.new_empty(*query.shape[:2], latent_dim + rope_dim)
    given = query, latent, key_rope, rotation, slots, cache
    rotated = absorbed[..., latent_dim:]
    rope_write(*given, latent_norm=latent_norm, eps=eps, rotated=rotated)
    weight = kv_b[:, :nope_dim].transpose(1, 2)
    head_linear(query[..., :nope_dim], weight, out=absorbed[..., :latent_dim])
    return absorbed


def path_for(query: torch.Tensor, key_rope: torch.Tensor, kv_b: torch.Tensor) -> str:
    """The path of `absorb_query`; "cublas" is the product of the one in parts."""
    if best_path("absorb", query.device) == "reference":
        return "reference"
    return "triton" if _fits(query, key_rope, kv_b) else "cublas"


def _check_weight(
    query: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor, kv_b: torch.Tensor
) -> None:
    nope_dim = query.shape[2] - key_rope.shape[1]
    fits = kv_b.dim() == 3 and kv_b.shape[::2] == (query.shape[1], latent.shape[1])
    if not fits or kv_b.shape[1] < nope_dim:
        raise ValueError(f"kv_b {tuple(kv_b.shape)} does not fit query {tuple(query.shape)}")
    check_operand("kv_b", kv_b, query.device, query.dtype)
    check_contiguous(query=query, kv_b=kv_b)


def _fits(query: torch.Tensor, key_rope: torch.Tensor, kv_b: torch.Tensor) -> bool:
    sizes = (query.shape[2] - key_rope.shape[1], kv_b.shape[2])
    fits = all(size >= 128 and size & (size - 1) == 0 for size in sizes)
    return fits and query.dtype == torch.bfloat16 and len(query) <= MAX_TOKENS
