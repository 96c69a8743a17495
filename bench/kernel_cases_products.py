"""Products with weights, and attention, at the sizes of DeepSeek-V3. Weights exceed the caches."""

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch

from bench.gpu_timing import Call
from bench.kernel_case import (
    BF16,
    CHOICES,
    EXPERTS,
    FP8,
    HEADS,
    HIDDEN,
    LATENT,
    LOCAL,
    NOPE,
    ROPE,
    WIDTH,
    Case,
    Tensor,
    Tensors,
)
from bench.kernels_floor import FP8_FLOPS
from kernels import fp8_gemm_triton, mla_decode_cuda, mla_prefill_cuda
from kernels.fp8_gemm import fp8_gemm, fp8_gemm_own
from kernels.fp8_grouped_gemm import fp8_grouped_gemm_contiguous, fp8_grouped_gemm_masked
from kernels.fp8_scales import empty_scales
from kernels.fused_experts import FusedExperts
from kernels.fused_moe import fused_moe
from kernels.head_linear import head_linear
from kernels.mla_decode_triton import join_pieces
from kernels.mla_prefill_plan import plan_groups
from kernels.paged_rows import Row

DENSE = ((7168, 16384), (24576, 1536), (2112, 7168), (4096, 7168))
GROUPED = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
SIZES = {"value_dim": LATENT, "scale": 192**-0.5}
CONTIGUOUS = 4096  # rows of each of 8 experts


def cases(make: Tensors) -> Iterator[Case]:
    for tokens in (16, 64, 128, 4096):
        yield from _dense(make, tokens)
    for rows in (1, 16, 64, 256):
        yield from _masked(make, rows)
    yield from _contiguous(make)
    for tokens in (16, 128):
        yield from _per_head(make, tokens)
        yield from _routed(make, tokens)
    yield from _attention(make)
    yield from _prefill(make)


def _dense(make: Tensors, tokens: int) -> Iterator[Case]:
    for n, k in DENSE:
        x, weight = make.fp8(tokens, k), make.fp8(n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(-(-n // 128), k // 128)
        operands = (x, x_scale, weight, w_scale)
        for path, call in (("own ", fp8_gemm_own), ("", fp8_gemm)):
            yield Case(
                bench="fp8_gemm", name=f"{path}dense m{tokens} n{n} k{k}",
                call=partial(call, *operands),
                num_bytes=weight.numel() + x.numel() + BF16 * tokens * n,
                num_flops=2.0 * tokens * n * k, flops_per_second=FP8_FLOPS,
                library=partial(_deep_gemm_dense, operands=operands),
            )  # fmt: skip


def _deep_gemm_dense(deep_gemm: ModuleType, operands: tuple[Tensor, ...]) -> Call:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    return lambda: deep_gemm.fp8_gemm_nt((x, x_scale), (weight, w_scale), out)


def _masked(make: Tensors, rows: int) -> Iterator[Case]:
    for n, k in GROUPED:
        capacity = max(128, rows)
        x, weight = make.fp8(LOCAL, capacity, k), make.fp8(LOCAL, n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(LOCAL, n // 128, k // 128)
        counts = make.full((LOCAL,), rows, torch.int32)
        operands = (x, x_scale, weight, w_scale, counts)
        for path, call in (
            ("triton ", partial(fp8_gemm_triton.masked, *operands, rows)),
            ("", partial(fp8_grouped_gemm_masked, *operands, expected_rows=rows)),
        ):
            yield Case(
                bench="fp8_grouped_gemm", name=f"{path}masked e{LOCAL} m{rows} n{n} k{k}",
                call=call, num_bytes=weight.numel() + LOCAL * rows * (k + BF16 * n),
                num_flops=2.0 * LOCAL * rows * n * k, flops_per_second=FP8_FLOPS,
                library=partial(_deep_gemm_masked, operands=operands, rows=rows),
            )  # fmt: skip


def _deep_gemm_masked(deep_gemm: ModuleType, operands: tuple[Tensor, ...], rows: int) -> Call:
    x, x_scale, weight, w_scale, counts = operands
    out = x.new_empty(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    return lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(
        (x, x_scale), (weight, w_scale), out, counts, rows
    )


def _contiguous(make: Tensors) -> Iterator[Case]:
    num_experts = 8
    for n, k in GROUPED:
        x, weight = make.fp8(num_experts * CONTIGUOUS, k), make.fp8(num_experts, n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = make.random(num_experts, n // 128, k // 128)
        expert_of = torch.arange(num_experts, device=make.device).int()
        expert_of = expert_of.repeat_interleave(CONTIGUOUS, output_size=num_experts * CONTIGUOUS)
        operands = (x, x_scale, weight, w_scale, expert_of)
        ends = CONTIGUOUS * torch.arange(1, num_experts + 1, device=make.device).int()
        for path, call in (
            ("triton ", fp8_gemm_triton.contiguous),
            ("", partial(fp8_grouped_gemm_contiguous, ends=ends)),
        ):
            yield Case(
                bench="fp8_grouped_gemm", call=partial(call, *operands),
                name=f"{path}contiguous e{num_experts} m{CONTIGUOUS} n{n} k{k}",
                num_bytes=weight.numel() + len(x) * (k + BF16 * n),
                num_flops=2.0 * len(x) * n * k, flops_per_second=FP8_FLOPS,
                library=partial(_deep_gemm_contiguous, operands=operands),
            )  # fmt: skip


def _deep_gemm_contiguous(deep_gemm: ModuleType, operands: tuple[Tensor, ...]) -> Call:
    x, x_scale, weight, w_scale, expert_of = operands
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (x, x_scale), (weight, w_scale), out, expert_of
    )


def _per_head(make: Tensors, tokens: int) -> Iterator[Case]:
    """The products around absorbed attention, out of longer vectors and into such."""
    for n, k in ((LATENT, NOPE), (NOPE, LATENT)):
        x, out = make.rows(tokens, HEADS, k + ROPE), make.rows(tokens, HEADS, n + ROPE)
        quantised = make.fp8(HEADS, n, k)
        scale = make.random(HEADS, n // 128, k // 128)
        plain = quantised.bfloat16()
        for name, weight, given in (("bf16", plain, None), ("fp8", quantised, scale)):
            yield Case(
                bench="head_linear", name=f"{name} m{tokens} heads{HEADS} n{n} k{k}",
                call=partial(head_linear, x[..., :k], weight, out[..., :n], scale=given),
                num_bytes=weight.nbytes + BF16 * tokens * HEADS * (n + k),
                num_flops=2.0 * tokens * HEADS * n * k,
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
                fused_moe, hidden, local, weights, experts, scaling=2.5,
                expected_rows=round(num_rows / LOCAL),
            ),
            num_bytes=size * num_weights + 2 * BF16 * hidden.numel(),
            num_flops=6.0 * num_rows * HIDDEN * WIDTH,
            flops_per_second=FP8_FLOPS / size,
        )  # fmt: skip


def _attention(make: Tensors) -> Iterator[Case]:
    """Ours, joined; where FlashMLA is installed it is the peer, each call with its own plan."""
    for num_rows, length in ((128, 4096), (16, 4096), (1, 4096), (1, 32768)):
        query = make.rows(num_rows, HEADS, LATENT + ROPE)
        num_pages = num_rows * length // 64
        cache = make.rows(num_pages, 64, LATENT + ROPE)
        table = make.permutation(num_pages).int().view(num_rows, -1)
        lengths = make.full((num_rows,), length, torch.int32)
        operands = (query, cache, table, lengths)
        yield Case(
            bench="mla_decode", name=f"b{num_rows} heads{HEADS} kv{length}",
            call=partial(_mla_decode, operands),
            num_bytes=BF16 * (cache.numel() + query.numel() + num_rows * HEADS * LATENT),
            num_flops=2.0 * num_rows * HEADS * length * (2 * LATENT + ROPE),
            package="flash_mla",
            library=partial(_flash_mla, operands=operands),
        )  # fmt: skip


def _prefill(make: Tensors) -> Iterator[Case]:
    """Attention over keys that are expanded already, all causal or behind a cached prefix."""
    for tokens, length in ((4096, 4096), (512, 4096)):
        query = make.rows(tokens, HEADS, NOPE + ROPE)
        rows = (Row(0, tokens, length, torch.arange(length // 64)),)
        (group,) = plan_groups(rows, 64, length, query.device)
        both, key_rope = make.rows(length, HEADS, 2 * NOPE), make.rows(length, ROPE)
        out, lse = make.rows(tokens, HEADS, NOPE), make.random(tokens, HEADS)
        seen = tokens * (length - tokens) + tokens * tokens / 2
        yield Case(
            bench="mla_prefill", name=f"m{tokens} heads{HEADS} kv{length}",
            call=partial(
                mla_prefill_cuda.launch, query, both, key_rope, group, out, lse,
                scale=SIZES["scale"],
            ),
            num_bytes=BF16 * (query.numel() + both.numel() + out.numel()),
            num_flops=2.0 * HEADS * seen * (2 * NOPE + ROPE),
        )  # fmt: skip


def _mla_decode(operands: tuple[Tensor, ...]) -> Tensor:
    return join_pieces(mla_decode_cuda.launch(*operands, scale=SIZES["scale"]))


def _flash_mla(_: ModuleType, operands: tuple[Tensor, ...]) -> Call:
    from kernels import mla_decode_flash

    query, cache, table, lengths = operands

    def call() -> Tensor:
        schedule = mla_decode_flash.Schedule(lengths, 1, HEADS)
        return mla_decode_flash.launch(query, cache, table, lengths, schedule, scale=SIZES["scale"])

    return call
