"""Attention and the products per head around it, at the sizes of DeepSeek-V3.

Launches that fold or unfold queries and values take the weights of several layers in turn, since in
a step those come from memory.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType

import torch

from bench.kernel_cases.case import (
    BF16,
    FP8,
    GROUP_SCALE,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    Case,
    Tensor,
    Tensors,
    in_turn,
)
from bench.kernel_cases.gpu_timing import Call
from kernels.attention import mla_decode_cuda, mla_decode_triton, mla_prefill_cuda
from kernels.attention.absorb import absorb_values
from kernels.attention.absorb_query import absorb_query
from kernels.attention.mla_decode_splits import TOKENS, Splits
from kernels.attention.mla_prefill_plan import plan_groups
from kernels.attention.paged_rows import Row
from kernels.gemm.head_linear import head_linear

SCALE = 192**-0.5
LAYERS = 8
FOLDED = (16, 128)  # tokens of products per head
# Rows, new tokens of each, tokens that it has with them: whole pages.
DECODED = (
    (128, 1, 4096),
    (16, 1, 4096),
    (1, 1, 4096),
    (1, 1, 32768),
    (32, 4, 4096),
    (16, 8, 4096),
)
BY_TRITON = 128  # new tokens of a step from which Triton's path is measured, too
PREFILLED = ((4096, 4096), (512, 4096))  # new tokens, and all
JOINED = (1, 16, 32, 128)  # rows whose latents are multiplied
CACHED = 4096  # tokens of each of them
# Of attention with 128 heads on 132 multiprocessors.
PARTS, MIN_TILES = 66, mla_decode_cuda.MIN_TILES


def cases(make: Tensors) -> Iterator[Case]:
    for tokens in FOLDED:
        yield from _per_head(make, tokens)
    weights = [make.rows(HEADS, 2 * NOPE, LATENT) for _ in range(LAYERS)]
    for tokens in JOINED:
        yield from _absorb(make, tokens, weights)
    yield from _decode(make)
    yield from _prefill(make)


def _per_head(make: Tensors, tokens: int) -> Iterator[Case]:
    """Out of longer vectors and into such."""
    for n, k in ((LATENT, NOPE), (NOPE, LATENT)):
        x, out = make.rows(tokens, HEADS, k + ROPE), make.rows(tokens, HEADS, n + ROPE)
        weight = make.rows(HEADS, n, k)
        yield Case(
            bench="head_linear", name=f"bf16 m{tokens} heads{HEADS} n{n} k{k}",
            call=partial(head_linear, x[..., :k], weight, out[..., :n]),
            num_bytes=weight.nbytes + BF16 * tokens * HEADS * (n + k),
            num_flops=2.0 * tokens * HEADS * n * k,
        )  # fmt: skip


def _absorb(make: Tensors, tokens: int, weights: Sequence[Tensor]) -> Iterator[Case]:
    """As in a step of decoding: launches overlap with those before them and after."""
    num_values = tokens * HEADS * NOPE
    latents = make.rows(tokens, HEADS, LATENT)
    splits = _splits(make, tokens)
    num_in_splits = _num_splits(tokens) * HEADS * (BF16 * LATENT + 4)
    num_flops = 2.0 * num_values * LATENT
    for name, given, num_given in (
        (f"values m{tokens} heads{HEADS}", latents, latents.nbytes),
        (f"values of pieces b{tokens} heads{HEADS} kv{CACHED}", splits, num_in_splits),
    ):
        yield Case(
            bench="absorb", name=name,
            call=in_turn(
                partial(absorb_values, given, kv_b, NOPE, follows=True) for kv_b in weights
            ),
            num_bytes=BF16 * HEADS * NOPE * LATENT + num_given + num_values * (FP8 + GROUP_SCALE),
            num_flops=num_flops,
        )  # fmt: skip
    query, projected = make.rows(tokens, HEADS, NOPE + ROPE), make.rows(tokens, LATENT + ROPE)
    angles = make.random(tokens, ROPE // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    slots, cache = make.permutation(tokens), make.rows(tokens // 64 + 1, 64, LATENT + ROPE)
    operands = (query, projected[:, :LATENT], projected[:, LATENT:], rotation, slots, cache)
    norm = make.rows(LATENT)
    yield Case(
        bench="absorb_query", name=f"m{tokens} heads{HEADS}",
        call=in_turn(
            partial(absorb_query, *operands, kv_b, latent_norm=norm, eps=1e-6, leads=True)
            for kv_b in weights
        ),
        num_bytes=BF16 * (HEADS * NOPE * LATENT + query.numel())
        + BF16 * tokens * (HEADS + 2) * (LATENT + ROPE),
        num_flops=num_flops,
    )  # fmt: skip


def _splits(make: Tensors, num_rows: int) -> Splits:
    """What our kernel leaves of rows of CACHED tokens."""
    num_places = num_rows + PARTS
    return Splits(
        values=make.rows(num_places, HEADS, LATENT),
        lse=make.random(num_places, HEADS),
        kv_lengths=make.full((num_rows,), CACHED, torch.int32),
        num_parts=PARTS,
        min_tiles=MIN_TILES,
        num_queries=1,
    )


def _num_splits(num_rows: int) -> int:
    """How many of the places hold something."""
    tiles = -(-CACHED // TOKENS)
    per_part = max(-(-num_rows * tiles // PARTS), MIN_TILES)
    ends = range(tiles, num_rows * tiles + 1, tiles)
    return sum((end - 1) // per_part - (end - tiles) // per_part + 1 for end in ends)


def _decode(make: Tensors) -> Iterator[Case]:
    """Ours, joined; where FlashMLA is installed it is the peer, each call with its own plan."""
    for num_rows, num_queries, length in DECODED:
        num_tokens = num_rows * num_queries
        query = make.rows(num_tokens, HEADS, LATENT + ROPE)
        num_pages = num_rows * length // 64
        cache = make.rows(num_pages, 64, LATENT + ROPE)
        table = make.permutation(num_pages).int().view(num_rows, -1)
        lengths = make.full((num_rows,), length, torch.int32)
        operands = (query, cache, table, lengths)
        # The last of a row's new tokens sees all of it, the one before all but one, and so on.
        seen = num_tokens * (length - (num_queries - 1) / 2)
        several = f" q{num_queries}" if num_queries > 1 else ""
        paths = {"": _own_decode} | ({"triton ": _triton_decode} if num_tokens >= BY_TRITON else {})
        for path, call in paths.items():
            yield Case(
                bench="mla_decode", name=f"{path}b{num_rows}{several} heads{HEADS} kv{length}",
                call=partial(call, operands),
                num_bytes=BF16 * (cache.numel() + query.numel() + num_tokens * HEADS * LATENT),
                num_flops=2.0 * HEADS * seen * (2 * LATENT + ROPE),
                package="flash_mla",
                library=partial(_flash_mla, operands=operands),
            )  # fmt: skip


def _own_decode(operands: tuple[Tensor, ...]) -> Tensor:
    return mla_decode_triton.join_splits(mla_decode_cuda.launch(*operands, scale=SCALE))


def _triton_decode(operands: tuple[Tensor, ...]) -> Tensor:
    return mla_decode_triton.launch(*operands, value_dim=LATENT, scale=SCALE)[0]


def _flash_mla(_: ModuleType, operands: tuple[Tensor, ...]) -> Call:
    from kernels.attention import mla_decode_flash

    query, cache, table, lengths = operands

    def call() -> Tensor:
        schedule = mla_decode_flash.Schedule(lengths, len(query) // len(lengths), HEADS)
        return mla_decode_flash.launch(query, cache, table, lengths, schedule, scale=SCALE)

    return call


def _prefill(make: Tensors) -> Iterator[Case]:
    """Over keys that are expanded already, all causal or after a cached prefix."""
    for tokens, length in PREFILLED:
        query = make.rows(tokens, HEADS, NOPE + ROPE)
        rows = (Row(0, tokens, length, torch.arange(length // 64)),)
        (group,) = plan_groups(rows, 64, length, query.device)
        both, key_rope = make.rows(length, HEADS, 2 * NOPE), make.rows(length, ROPE)
        out, lse = make.rows(tokens, HEADS, NOPE), make.random(tokens, HEADS)
        seen = tokens * (length - tokens) + tokens * tokens / 2
        yield Case(
            bench="mla_prefill", name=f"m{tokens} heads{HEADS} kv{length}",
            call=partial(
                mla_prefill_cuda.launch, query, both, key_rope, group, out, lse, scale=SCALE
            ),
            num_bytes=BF16 * (query.numel() + both.numel() + out.numel()),
            num_flops=2.0 * HEADS * seen * (2 * NOPE + ROPE),
        )  # fmt: skip
