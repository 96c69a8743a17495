"""Products with weights of layers and of experts, at the sizes of DeepSeek-V3. Most weights exceed
the caches."""

from collections.abc import Iterator
from functools import partial

import torch

from bench.kernel_cases.case import (
    BF16,
    CHOICES,
    EXPERTS,
    FP8,
    HIDDEN,
    LOCAL,
    WIDTH,
    Case,
    Tensor,
    Tensors,
    function_of,
)
from bench.kernel_cases.w4a8_floor import FP8_FLOPS
from kernels.build.fp8_scales import empty_scales
from kernels.gemm import fp8_gemm_triton
from kernels.gemm.fp8_gemm import fp8_gemm, fp8_gemm_own
from kernels.gemm.grouped_linear import grouped_linear_aligned, grouped_linear_masked
from kernels.moe.fp8_grouped_gemm import fp8_grouped_gemm_contiguous, fp8_grouped_gemm_masked
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import fused_moe

DENSE = ((7168, 16384), (24576, 1536), (2112, 7168), (4096, 7168))
DENSE_TOKENS = (16, 64, 128, 4096)
GROUPED = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
MASKED = (1, 16, 64, 256)  # rows of each expert
CONTIGUOUS = (8, 4096)  # experts, rows of each
ROUTED = (16, 128)  # tokens of each of 8 ranks


def cases(make: Tensors) -> Iterator[Case]:
    for tokens in DENSE_TOKENS:
        yield from _dense(make, tokens)
    for rows in MASKED:
        yield from _masked(make, rows)
    yield from _contiguous(make)
    for rows in MASKED:
        yield from _bf16_masked(make, rows)
    yield from _bf16_aligned(make)
    for tokens in ROUTED:
        yield from _routed(make, tokens)


def _dense(make: Tensors, tokens: int) -> Iterator[Case]:
    for n, k in DENSE:
        x, weight = make.fp8(tokens, k), make.fp8(n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(-(-n // 128), k // 128)
        operands = (x, x_scale, weight, w_scale)
        out = make.rows(tokens, n)
        for path, call in (("own ", fp8_gemm_own), ("", fp8_gemm)):
            yield Case(
                bench="fp8_gemm", name=f"{path}dense m{tokens} n{n} k{k}",
                call=partial(call, *operands),
                num_bytes=weight.numel() + x.numel() + BF16 * tokens * n,
                num_flops=2.0 * tokens * n * k, flops_per_second=FP8_FLOPS,
                library=function_of("fp8_gemm_nt", (x, x_scale), (weight, w_scale), out),
            )  # fmt: skip


def _masked(make: Tensors, rows: int) -> Iterator[Case]:
    for n, k in GROUPED:
        capacity = max(128, rows)
        x, weight = make.fp8(LOCAL, capacity, k), make.fp8(LOCAL, n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(LOCAL, n // 128, k // 128)
        counts = make.full((LOCAL,), rows, torch.int32)
        operands = (x, x_scale, weight, w_scale, counts)
        out = make.rows(LOCAL, capacity, n)
        for path, call in (
            ("triton ", partial(fp8_gemm_triton.masked, operands[:4], counts, rows)),
            ("", partial(fp8_grouped_gemm_masked, *operands, expected_rows=rows)),
        ):
            yield Case(
                bench="fp8_grouped_gemm", name=f"{path}masked e{LOCAL} m{rows} n{n} k{k}",
                call=call, num_bytes=weight.numel() + LOCAL * rows * (k + BF16 * n),
                num_flops=2.0 * LOCAL * rows * n * k, flops_per_second=FP8_FLOPS,
                library=function_of(
                    "fp8_m_grouped_gemm_nt_masked", (x, x_scale), (weight, w_scale), out, counts,
                    rows,
                ),
            )  # fmt: skip


def _contiguous(make: Tensors) -> Iterator[Case]:
    num_experts, rows = CONTIGUOUS
    expert_of = _expert_of(make)
    ends = rows * torch.arange(1, num_experts + 1, device=make.device).int()
    for n, k in GROUPED:
        x, weight = make.fp8(len(expert_of), k), make.fp8(num_experts, n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(num_experts, n // 128, k // 128)
        operands = (x, x_scale, weight, w_scale, expert_of)
        out = make.rows(len(x), n)
        for path, call in (
            ("triton ", partial(fp8_gemm_triton.contiguous, operands[:4], expert_of)),
            ("", partial(fp8_grouped_gemm_contiguous, *operands, ends=ends)),
        ):
            yield Case(
                bench="fp8_grouped_gemm", call=call,
                name=f"{path}contiguous e{num_experts} m{rows} n{n} k{k}",
                num_bytes=weight.numel() + len(x) * (k + BF16 * n),
                num_flops=2.0 * len(x) * n * k, flops_per_second=FP8_FLOPS,
                library=function_of(
                    "m_grouped_fp8_gemm_nt_contiguous", (x, x_scale), (weight, w_scale), out,
                    expert_of,
                ),
            )  # fmt: skip


def _expert_of(make: Tensors) -> Tensor:
    """Of each of the rows that are CONTIGUOUS."""
    num_experts, rows = CONTIGUOUS
    experts = torch.arange(num_experts, device=make.device).int()
    return experts.repeat_interleave(rows, output_size=num_experts * rows)


def _bf16_masked(make: Tensors, rows: int) -> Iterator[Case]:
    for n, k in GROUPED:
        x, weight = make.rows(LOCAL, max(128, rows), k), make.rows(LOCAL, n, k)
        counts = make.full((LOCAL,), rows, torch.int32)
        out = make.rows(*x.shape[:2], n)
        yield Case(
            bench="grouped_linear", name=f"masked e{LOCAL} m{rows} n{n} k{k}",
            call=partial(grouped_linear_masked, x, counts, weight, expected_rows=rows),
            num_bytes=BF16 * (weight.numel() + LOCAL * rows * (k + n)),
            num_flops=2.0 * LOCAL * rows * n * k,
            library=function_of("m_grouped_bf16_gemm_nt_masked", x, weight, out, counts, rows),
        )  # fmt: skip


def _bf16_aligned(make: Tensors) -> Iterator[Case]:
    num_experts, rows = CONTIGUOUS
    expert_of = _expert_of(make)
    for n, k in GROUPED:
        x, weight = make.rows(len(expert_of), k), make.rows(num_experts, n, k)
        out = make.rows(len(x), n)
        yield Case(
            bench="grouped_linear", name=f"aligned e{num_experts} m{rows} n{n} k{k}",
            call=partial(grouped_linear_aligned, x, expert_of, weight),
            num_bytes=BF16 * (weight.numel() + len(x) * (k + n)),
            num_flops=2.0 * len(x) * n * k,
            library=function_of("m_grouped_bf16_gemm_nt_contiguous", x, weight, out, expert_of),
        )  # fmt: skip


def _routed(make: Tensors, tokens: int) -> Iterator[Case]:
    """All experts of a rank that has 32 of 256, and the tokens of 8 ranks."""
    choices = make.random(8 * tokens, EXPERTS).topk(CHOICES).indices
    local = torch.where(choices < LOCAL, choices, -1)
    hidden, weights = make.rows(8 * tokens, HIDDEN), make.random(8 * tokens, CHOICES)
    num_weights = 3 * LOCAL * HIDDEN * WIDTH
    num_rows = 8 * tokens * CHOICES * LOCAL / EXPERTS
    scales = [make.random(LOCAL, n // 128, k // 128) * 1e-3 for n, k in GROUPED]
    quantised = FusedExperts(
        gate_up=make.fp8(LOCAL, 2 * WIDTH, HIDDEN), down=make.fp8(LOCAL, HIDDEN, WIDTH),
        gate_up_scale=scales[0], down_scale=scales[1],
    )  # fmt: skip
    plain = FusedExperts(gate_up=quantised.gate_up.bfloat16(), down=quantised.down.bfloat16())
    for name, experts, size in (("fp8", quantised, FP8), ("bf16", plain, BF16)):
        yield Case(
            bench="fused_moe", name=f"{name} m{tokens} x 8 e{LOCAL} of {EXPERTS}",
            call=partial(
                fused_moe, hidden, local, weights, experts,
                expected_rows=round(num_rows / LOCAL),
            ),
            num_bytes=size * num_weights + 2 * BF16 * hidden.numel(),
            num_flops=6.0 * num_rows * HIDDEN * WIDTH,
            flops_per_second=FP8_FLOPS / size,
        )  # fmt: skip
