"""Rows of experts around the products, at the sizes of DeepSeek-V3: packed to travel between ranks,
and in the masked layout; int4 weights that are packed, and weights fetched ahead of a product."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.kernel_cases.case import (
    BF16,
    CHOICES,
    EXPERTS,
    FP8,
    GROUP_SCALE,
    HIDDEN,
    LOCAL,
    WIDTH,
    Case,
    Tensors,
)
from kernels.build.fp8_scales import empty_scales
from kernels.elementwise import quantise_triton
from kernels.elementwise.rescale import rescale
from kernels.elementwise.silu_mul import silu_mul, silu_mul_quantise
from kernels.moe.pack_tokens import pack_tokens
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, pack_blocks

SENT = (1, 128)  # tokens of a rank
MASKED = (8, 32, 128)  # rows of each expert
CAPACITY = 128  # rows that an expert has room for


def cases(make: Tensors) -> Iterator[Case]:
    for tokens in SENT:
        yield from _packed(make, tokens)
    for rows in MASKED:
        yield from _masked(make, rows)
    yield _packing(make)


def _packing(make: Tensors) -> Case:
    """Of int4 weights at load, eight experts at a time."""
    shape, num_blocks = (8, 2 * WIDTH), 8 * 2 * WIDTH // 128 * HIDDEN // 128
    nibbles = make.full((*shape, HIDDEN // 2), 0x37, torch.int8)
    scales = make.full((*shape, HIDDEN // 128), 0.01, torch.float32)
    return Case(
        bench="w4a8_packing", name=f"e8 n{2 * WIDTH} k{HIDDEN}",
        call=partial(pack_blocks, nibbles, scales),
        num_bytes=nibbles.nbytes + scales.nbytes + num_blocks * BLOCK_BYTES,
    )  # fmt: skip


def _packed(make: Tensors, tokens: int) -> Iterator[Case]:
    hidden, weights = make.rows(tokens, HIDDEN), make.random(tokens, CHOICES)
    topk_idx = make.random(tokens, EXPERTS).topk(CHOICES).indices
    of_choices = CHOICES * (8 + 4 + 4 + 4)  # int64 and float32, becoming words
    forms: dict[str, tuple[dict[str, Any], float]] = {
        "": ({"quantises": False}, BF16 * HIDDEN),
        "quantise ": ({"quantises": True}, (FP8 + GROUP_SCALE) * HIDDEN),
        "quantise static scale ": (
            {"quantises": True, "scale": make.full((), 0.01, torch.float32)}, FP8 * HIDDEN,
        ),
    }  # fmt: skip
    for name, (form, size) in forms.items():
        yield Case(
            bench="pack_tokens", name=f"{name}m{tokens} h{HIDDEN} top{CHOICES}",
            call=partial(pack_tokens, hidden, topk_idx, weights, tokens, **form),
            num_bytes=tokens * (BF16 * HIDDEN + size + of_choices),
        )  # fmt: skip


def _masked(make: Tensors, rows: int) -> Iterator[Case]:
    """All experts have as many rows."""
    counts = make.full((LOCAL,), rows, torch.int32)
    x, both = make.rows(LOCAL, CAPACITY, HIDDEN), make.rows(LOCAL, CAPACITY, 2 * WIDTH)
    num, num_inner = LOCAL * rows * HIDDEN, LOCAL * rows * WIDTH
    yield Case(
        bench="quantise", name=f"masked e{LOCAL} m{rows} k{HIDDEN}",
        call=lambda: quantise_triton.launch(x, counts, expected_rows=rows),
        num_bytes=num * (BF16 + FP8 + GROUP_SCALE),
    )  # fmt: skip
    yield Case(
        bench="silu_mul", name=f"masked e{LOCAL} m{rows} i{WIDTH}",
        call=lambda: silu_mul(both, counts, expected_rows=rows),
        num_bytes=num_inner * 3 * BF16,
    )  # fmt: skip
    static = make.full((), 0.01, torch.float32)
    for name, scale, of_scales in (("", None, GROUP_SCALE), (" static scale", static, 0)):
        yield Case(
            bench="silu_mul", name=f"masked quantise{name} e{LOCAL} m{rows} i{WIDTH}",
            call=partial(
                silu_mul_quantise, both, counts, scale=scale, expected_rows=rows
            ),
            num_bytes=num_inner * (2 * BF16 + FP8 + of_scales),
        )  # fmt: skip
    values = make.fp8(LOCAL, CAPACITY, HIDDEN)
    scales = empty_scales(values).fill_(0.01)
    yield Case(
        bench="rescale", name=f"e{LOCAL} m{rows} k{HIDDEN}",
        call=lambda: rescale(values, scales, static, counts, expected_rows=rows),
        num_bytes=num * (2 * FP8 + GROUP_SCALE),
    )  # fmt: skip
