"""Triton path of `absorb_query`: a program writes a token's line of the cache, or makes a
block of columns of a head's queries; the first block's program also rotates.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.rope_write_triton import halves_of, words_of, write_line
from kernels.build.dependent_launch_triton import dependent
from kernels.build.operands import check_contiguous


class AbsorbQueryShape(NamedTuple):
    """Tokens and columns of a block, warps of a program."""

    tokens: int
    columns: int
    num_warps: int


def shape_for(num_tokens: int) -> AbsorbQueryShape:
    if num_tokens <= 32:
        return AbsorbQueryShape(max(16, triton.next_power_of_2(num_tokens)), 128, 4)
    return AbsorbQueryShape(64, 128, 4 if num_tokens <= 64 else 8)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _absorb_query(
    query, query_pairs, absorbed, absorbed_pairs, weight, latent, latent_norm, key_rope, rotation,
    slots, cache, num_slots, num_tokens, num_heads, weight_head_stride, latent_stride, key_stride,
    eps,
    nope_dim: tl.constexpr, latent_dim: tl.constexpr, half: tl.constexpr,
    padded_half: tl.constexpr, tokens: tl.constexpr, columns: tl.constexpr,
    precision: tl.constexpr, leads: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    if leads:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    pair = tl.arange(0, padded_half)
    is_pair = pair < half
    if program < num_tokens:
        if dependent:
            tl.extra.cuda.gdc_wait()
        token = program.to(tl.int64)
        cosine, sine = halves_of(tl.load(rotation + token * half + pair, mask=is_pair, other=0))
        write_line(
            latent, latent_norm, key_rope, slots, cache, num_slots, token, cosine, sine,
            latent_stride, key_stride, latent_dim, eps, half, padded_half, latent_dim, True,
        )  # fmt: skip
    else:
        blocks: tl.constexpr = latent_dim // columns
        number = program - num_tokens
        block = number % blocks
        head = number // blocks % num_heads
        row = number // blocks // num_heads * tokens + tl.arange(0, tokens)
        is_token = (row < num_tokens)[:, None]
        line = row.to(tl.int64) * num_heads + head
        index = tl.arange(0, nope_dim)
        column = block * columns + tl.arange(0, columns)
        place = weight + head.to(tl.int64) * weight_head_stride
        w = tl.load(place + index[:, None] * latent_dim + column[None, :])
        # Weights are there already; the queries of the kernel before may not be.
        if dependent:
            tl.extra.cuda.gdc_wait()
        start = line[:, None] * (nope_dim + 2 * half)
        x = tl.load(query + start + index[None, :], mask=is_token, other=0.0)
        total = tl.dot(x, w, input_precision=precision)
        goal = absorbed + line[:, None] * (latent_dim + 2 * half)
        tl.store(goal + column[None, :], total.to(x.dtype), mask=is_token)
        if block == 0:
            inside = is_token & is_pair[None, :]
            angles = tl.load(rotation + row[:, None] * half + pair[None, :], mask=inside, other=0)
            cosine, sine = halves_of(angles)
            source = line[:, None] * (nope_dim // 2 + half) + nope_dim // 2 + pair[None, :]
            words = tl.load(query_pairs + source, mask=inside, other=0)
            real, imaginary = halves_of(words)
            turned = words_of(
                real * cosine - imaginary * sine, real * sine + imaginary * cosine,
                words.dtype == tl.int32,
            )  # fmt: skip
            target = line[:, None] * (latent_dim // 2 + half) + latent_dim // 2 + pair[None, :]
            tl.store(absorbed_pairs + target, turned, mask=inside)


def launch(
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
    shape: AbsorbQueryShape | None = None,
) -> torch.Tensor:
    """`shape`: another one than that of the number of tokens, to measure it."""
    num_tokens, num_heads, width = query.shape
    latent_dim, rope_dim = kv_b.shape[2], key_rope.shape[1]
    absorbed = query.new_empty(num_tokens, num_heads, latent_dim + rope_dim)
    if not num_tokens:
        return absorbed
    check_contiguous(query=query, kv_b=kv_b, cache=cache)
    assert latent.stride(1) == key_rope.stride(1) == 1
    shape, is_dependent = shape or shape_for(num_tokens), dependent(query)
    pairs = torch.int32 if query.element_size() == 2 else torch.int64
    blocks = latent_dim // shape.columns * triton.cdiv(num_tokens, shape.tokens)
    _absorb_query[(num_tokens + num_heads * blocks,)](
        query, query.view(pairs), absorbed, absorbed.view(pairs), kv_b, latent, latent_norm,
        key_rope, torch.view_as_real(rotation).view(torch.int64), slots, cache,
        cache.shape[0] * cache.shape[1], num_tokens, num_heads, kv_b.stride(0), latent.stride(0),
        key_rope.stride(0), eps,
        nope_dim=width - rope_dim, latent_dim=latent_dim, half=rope_dim // 2,
        padded_half=triton.next_power_of_2(rope_dim // 2), tokens=shape.tokens,
        columns=shape.columns, precision="ieee" if query.dtype == torch.float32 else "tf32",
        leads=leads and is_dependent, dependent=is_dependent, num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )  # fmt: skip
    return absorbed
