"""Ways to launch small kernels whose times are launches and latencies rather than bytes: which is
best only a GPU says. `python -m bench.kernels --variants`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bench.gpu_timing import Call
from bench.kernel_case import EXPERTS, HEADS, HIDDEN, NOPE, WIDTH, Tensors
from bench.kernel_cases_products import DENSE
from kernels import (
    fp8_gemm_triton,
    merge_states_triton,
    quantise_triton,
    router_gemm_triton,
    silu_mul_triton,
)
from kernels.fp8_gemm_blocks import DENSE as DENSE_LAYOUT
from kernels.fp8_gemm_blocks import candidates
from kernels.quantise import empty_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Calls of equal results, the one in use first. `goal` in microseconds, 0: none."""

    bench: str
    name: str
    ways: dict[str, Call]
    goal: float = 0.0


# Groups of 128 values a program, warps a program.
ROW_SHAPES = ((8, 4), (2, 1), (4, 2), (8, 2), (16, 4), (16, 8), (32, 8))


def all_of(make: Tensors) -> Iterator[Variants]:
    for tokens, goal in ((1, 0.0), (128, 1.9), (4096, 0.0)):
        x = make.rows(1, tokens, HIDDEN)
        yield Variants(
            bench="quantise", name=f"m{tokens} k{HIDDEN}", goal=goal,
            ways={
                f"groups {groups} warps {warps}": partial(
                    quantise_triton.launch, x, None, squeeze=True, groups=groups, num_warps=warps
                )
                for groups, warps in ROW_SHAPES
            },
        )  # fmt: skip
    for tokens, goal in ((9, 0.0), (1152, 2.9), (36864, 0.0)):
        both = make.rows(1, tokens, 2 * WIDTH)
        yield Variants(
            bench="silu_mul", name=f"quantise m{tokens} i{WIDTH}", goal=goal,
            ways={
                f"groups {groups} warps {warps}": partial(
                    silu_mul_triton.launch_quantise, both, None, squeeze=True, groups=groups,
                    num_warps=warps,
                )
                for groups, warps in ROW_SHAPES if groups * 128 <= WIDTH
            },
        )  # fmt: skip
    a, b = (make.rows(128, HEADS, NOPE) for _ in range(2))
    lse = make.random(128, HEADS)
    yield Variants(
        bench="merge_states", name=f"m128 heads{HEADS} v{NOPE}", goal=3.1,
        ways={
            f"rows {rows} warps {warps}": partial(
                merge_states_triton.launch, a, lse, b, lse, rows=rows, num_warps=warps
            )
            for rows, warps in ((8, 4), (2, 1), (4, 2), (8, 2), (16, 4), (32, 8))
        },
    )  # fmt: skip
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
    yield from _fp8_gemm(make)


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
                    " ".join(f"{key}{value:d}" for key, value in blocks.record().items()): partial(
                        fp8_gemm_triton.dense, x, x_scale, weight, w_scale, blocks=blocks
                    )
                    for blocks in list(candidates(DENSE_LAYOUT, tokens, n, k))[:24:2]
                },
            )  # fmt: skip
