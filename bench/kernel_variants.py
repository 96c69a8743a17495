"""Ways to launch small kernels whose times are launches and latencies rather than bytes: which is
best only a GPU says. `python -m bench.kernels --variants`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.fp8_cuts import triton_cuts
from bench.gpu_timing import Call
from bench.kernel_case import EXPERTS, HEADS, HIDDEN, LATENT, NOPE, ROPE, WIDTH, Tensors
from bench.kernel_cases_products import DENSE
from kernels.attention import mla_decode_triton, mla_prefill_triton
from kernels.attention.mla_prefill_plan import plan_groups
from kernels.attention.paged_rows import Row
from kernels.build.fp8_gemm_blocks import DENSE as DENSE_LAYOUT
from kernels.build.fp8_scales import empty_scales
from kernels.elementwise import quantise_triton, silu_mul_triton
from kernels.gemm import fp8_gemm_triton, router_gemm_triton
from kernels.gemm.router_gemm_triton import RouterTritonShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Calls of equal results, the one in use first. `goal` in microseconds, 0: none."""

    bench: str
    name: str
    ways: dict[str, Call]
    goal: float = 0.0


# Groups of 128 values, rows and warps of a program; zeros: what is in use.
ROW_SHAPES = ((0, 0, 0), (2, 8, 2), (2, 8, 4), (4, 4, 4), (8, 1, 4), (16, 1, 4))


def all_of(make: Tensors) -> Iterator[Variants]:
    for tokens, goal in ((1, 0.0), (128, 1.9), (4096, 0.0)):
        x = make.rows(tokens, HIDDEN)
        yield Variants(
            bench="quantise", name=f"m{tokens} k{HIDDEN}", goal=goal,
            ways={
                _row_shape(groups, rows, warps): partial(
                    quantise_triton.launch, x, groups=groups, rows=rows,
                    num_warps=warps,
                )
                for groups, rows, warps in ROW_SHAPES
            },
        )  # fmt: skip
    for tokens, goal in ((9, 0.0), (1152, 0.0), (36864, 0.0)):
        both = make.rows(tokens, 2 * WIDTH)
        yield Variants(
            bench="silu_mul", name=f"quantise m{tokens} i{WIDTH}", goal=goal,
            ways={
                _row_shape(groups, rows, warps): partial(
                    silu_mul_triton.launch_quantise, both, groups=groups,
                    rows=rows, num_warps=warps or 4,
                )
                for groups, rows, warps in ROW_SHAPES
            },
        )  # fmt: skip
        yield Variants(
            bench="silu_mul", name=f"m{tokens} i{WIDTH}", goal=2.9 if tokens == 1152 else 0.0,
            ways={
                f"columns {block} warps {warps}": partial(
                    silu_mul_triton.launch, both, block=block, num_warps=warps
                )
                for block, warps in ((2048, 8), (1024, 4), (1024, 2))
            },
        )  # fmt: skip
    yield from _router_gemm(make)
    yield from _fp8_gemm(make)


def _row_shape(groups: int, rows: int, warps: int) -> str:
    return f"groups {groups} rows {rows} warps {warps}" if groups else "in use"


def _router_gemm(make: Tensors) -> Iterator[Variants]:
    weight = make.rows(EXPERTS, HIDDEN)
    for tokens, goal in ((1, 2.1), (2, 0.0), (4, 0.0), (8, 0.0)):
        x = make.rows(tokens, HIDDEN)
        yield Variants(
            bench="router_gemm", name=f"m{tokens} n{EXPERTS} k{HIDDEN}", goal=goal,
            ways={
                "rows one by one": partial(router_gemm_triton.launch, x, weight, few_rows=tokens),
                "matrix instruction": partial(router_gemm_triton.launch, x, weight, few_rows=0),
            },
        )  # fmt: skip
    x = make.rows(4096, HIDDEN)
    yield Variants(
        bench="router_gemm", name=f"m4096 n{EXPERTS} k{HIDDEN}",
        ways={
            f"{m}x{n}x{k} programs {programs}": partial(
                router_gemm_triton.launch, x, weight,
                shape=RouterTritonShape(m, n, k, 8 if m * n > 8192 else 4, programs),
            )
            for m, n, k, programs in (
                (128, 128, 64, 128), (128, 128, 64, 64), (128, 256, 64, 64), (64, 256, 64, 128),
                (64, 128, 64, 256), (64, 16, 128, 128),
            )
        },
    )  # fmt: skip
    yield from _mla_decode(make)
    yield from _mla_prefill(make)


def _fp8_gemm(make: Tensors) -> Iterator[Variants]:
    """The default cut beside a few others; `bench.tune_fp8_gemm` tries all."""
    for tokens in (64, 4096):
        for n, k in DENSE[:2]:
            x, weight = make.fp8(tokens, k), make.fp8(n, k)
            x_scale = empty_scales(x).fill_(0.01)
            w_scale = make.random(n // 128, k // 128)
            yield Variants(
                bench="fp8_gemm", name=f"dense m{tokens} n{n} k{k}",
                ways={
                    " ".join(f"{key}{value:d}" for key, value in asdict(blocks).items()): partial(
                        fp8_gemm_triton.dense, (x, x_scale, weight, w_scale), blocks=blocks
                    )
                    for blocks in list(triton_cuts(DENSE_LAYOUT, tokens, n, k))[:24:2]
                },
            )  # fmt: skip


def _mla_decode(make: Tensors) -> Iterator[Variants]:
    """Tiles that a part has at least; tiles of 32 tokens, which Triton orders by itself."""
    for num_rows, length, goal in ((128, 4096, 398.0), (32, 2048, 0.0), (1, 4096, 0.0)):
        num_pages = num_rows * length // 64
        operands = (
            make.rows(num_rows, HEADS, LATENT + ROPE),
            make.rows(num_pages, 64, LATENT + ROPE),
            make.permutation(num_pages).int().view(num_rows, -1),
            make.full((num_rows,), length, torch.int32),
        )
        yield Variants(
            bench="mla_decode", name=f"b{num_rows} heads{HEADS} kv{length}", goal=goal,
            ways={
                f"tokens {tokens} stages {stages} at least {tiles}": partial(
                    mla_decode_triton.launch, *operands, value_dim=LATENT, scale=0.07,
                    tokens=tokens, num_stages=stages, min_tiles=tiles,
                )
                for tokens, stages, tiles in ((64, 3, 2), (64, 3, 1), (64, 3, 4), (32, 5, 4))
            },
        )  # fmt: skip


def _mla_prefill(make: Tensors) -> Iterator[Variants]:
    """Keys of a step, stages, warps."""
    for tokens, length in ((4096, 4096), (512, 4096)):
        query = make.rows(tokens, HEADS, NOPE + ROPE)
        rows = (Row(0, tokens, length, torch.arange(length // 64)),)
        (group,) = plan_groups(rows, 64, length, query.device)
        operands = (
            query, make.rows(length, HEADS, 2 * NOPE), make.rows(length, ROPE), group,
            make.rows(tokens, HEADS, NOPE), make.random(tokens, HEADS),
        )  # fmt: skip
        yield Variants(
            bench="mla_prefill", name=f"m{tokens} heads{HEADS} kv{length}",
            ways={
                f"keys {keys} stages {stages} warps {warps}": partial(
                    mla_prefill_triton.launch, *operands, scale=0.07, keys=keys,
                    num_stages=stages, num_warps=warps,
                )
                for keys, stages, warps in ((64, 3, 8), (64, 2, 8), (64, 4, 8), (128, 2, 8))
            },
        )  # fmt: skip
