"""Operations around attention and experts, each at the shapes of DeepSeek-V3: `make bench-kernels`.

Prints and records, per operation and number of tokens, our time, and as its peer the library's, or
where no library has the operation the floor: the bytes that must be read and written, at the rate
that a large copy reaches in the same run. Data of few tokens stays in the L2 cache, as it does
between the kernels of a step; weights exceed it.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TypeAlias

import torch

from bench.gpu_timing import Call, copy_bytes_per_second, microseconds
from bench.records import RESULTS, Record, Run, append
from kernels import fp8_gemm_triton, gate_triton
from kernels.combine import combine
from kernels.fp8_gemm import fp8_gemm
from kernels.fused_moe import Experts, fused_moe
from kernels.merge_states import merge_states
from kernels.mla_decode import mla_decode_paged
from kernels.permute import permute
from kernels.quantise import empty_scales, quantise
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantise
from kernels.rope_write import rope_write
from kernels.router_gemm import router_gemm
from kernels.silu_mul import silu_mul_quantise

HIDDEN, HEADS, LATENT, ROPE, NOPE, EXPERTS, CHOICES = 7168, 128, 512, 64, 128, 256, 8
TOKENS = (1, 128, 4096)
BF16, FP8 = 2, 1

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`num_bytes` that the operation must move at least."""

    bench: str
    name: str
    call: Call
    num_bytes: float
    library: Callable[[ModuleType], Call] | None = None  # DeepGEMM's call for the same


def rows(num: int, width: int) -> Tensor:
    return torch.randn(num, width, device="cuda", dtype=torch.bfloat16)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(60).clamp_(-400, 400).to(torch.float8_e4m3fn)


def small(tokens: int) -> Iterator[Case]:
    """Everything whose time goes with the bytes of its tokens."""
    x, residual, weight = rows(tokens, HIDDEN), rows(tokens, HIDDEN), rows(1, HIDDEN)[0]
    num = tokens * HIDDEN
    yield Case(
        bench="quantise", name=f"m{tokens} k{HIDDEN}", call=lambda: quantise(x),
        num_bytes=num * (BF16 + FP8),
    )  # fmt: skip
    yield Case(
        bench="rms_norm", name=f"add m{tokens} h{HIDDEN}",
        call=lambda: add_rms_norm(x, residual, weight, 1e-6), num_bytes=4 * num * BF16,
    )  # fmt: skip
    yield Case(
        bench="rms_norm", name=f"add quantise m{tokens} h{HIDDEN}",
        call=lambda: add_rms_norm_quantise(x, residual, weight, 1e-6),
        num_bytes=num * (3 * BF16 + FP8),
    )  # fmt: skip
    both = rows(9 * tokens, 4096)
    yield Case(
        bench="silu_mul", name=f"quantise m{9 * tokens} i2048",
        call=lambda: silu_mul_quantise(both), num_bytes=both.numel() * (BF16 + FP8 / 2),
    )  # fmt: skip
    a, b = (rows(tokens * HEADS, NOPE).view(tokens, HEADS, NOPE) for _ in range(2))
    lse = torch.randn(tokens, HEADS, device="cuda")
    yield Case(
        bench="merge_states", name=f"m{tokens} heads{HEADS} v{NOPE}",
        call=lambda: merge_states(a, lse, b, lse), num_bytes=3 * a.numel() * BF16,
    )  # fmt: skip
    yield from _around_attention(tokens)
    yield from _around_experts(tokens, x)


def _around_attention(tokens: int) -> Iterator[Case]:
    query = rows(tokens * HEADS, NOPE + ROPE).view(tokens, HEADS, NOPE + ROPE)
    projected = rows(tokens, LATENT + ROPE)
    angles = torch.randn(tokens, ROPE // 2, device="cuda")
    rotation = torch.polar(torch.ones_like(angles), angles)
    cache = torch.zeros(tokens // 64 + 1, 64, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(tokens, device="cuda")
    yield Case(
        bench="rope_write", name=f"m{tokens} heads{HEADS}",
        call=lambda: rope_write(
            query, projected[:, :LATENT], projected[:, LATENT:], rotation, slots, cache
        ),
        num_bytes=BF16 * 2 * tokens * (HEADS * ROPE + LATENT + ROPE),
    )  # fmt: skip


def _around_experts(tokens: int, x: Tensor) -> Iterator[Case]:
    gate_weight, bias = rows(EXPERTS, HIDDEN), torch.rand(EXPERTS, device="cuda")
    yield Case(
        bench="router_gemm", name=f"m{tokens} n{EXPERTS} k{HIDDEN}",
        call=lambda: router_gemm(x, gate_weight),
        num_bytes=BF16 * (x.numel() + gate_weight.numel()) + 4 * tokens * EXPERTS,
    )  # fmt: skip
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    choose = partial(
        gate_triton.launch, logits, bias, num_groups=8, groups_per_token=4,
        experts_per_token=CHOICES, norm_topk=True, scaling=2.5,
    )  # fmt: skip
    physical = torch.arange(EXPERTS, device="cuda").unsqueeze(1)
    replicas = torch.ones(EXPERTS, dtype=torch.int64, device="cuda")
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
    yield Case(
        bench="gate", name=f"m{tokens} e{EXPERTS} top{CHOICES}",
        call=partial(choose, physical=physical, num_replicas=replicas, counts=counts),
        num_bytes=tokens * (4 * EXPERTS + 20 * CHOICES),
    )  # fmt: skip
    topk_idx, _, topk_weights = choose()
    local = torch.where(topk_idx < 32, topk_idx, -1)
    permuted = permute(x, local, 32)
    num_here = int((local >= 0).sum())
    yield Case(
        bench="permute", name=f"m{tokens} e32 of {EXPERTS} h{HIDDEN}",
        call=lambda: permute(x, local, 32), num_bytes=2 * num_here * HIDDEN * BF16,
    )  # fmt: skip
    yield Case(
        bench="combine", name=f"m{tokens} e32 of {EXPERTS} h{HIDDEN}",
        call=lambda: combine(permuted.rows, permuted.row_of, topk_weights, scaling=2.5, base=x),
        num_bytes=(num_here + 2 * tokens) * HIDDEN * BF16,
    )  # fmt: skip


def large(tokens: int) -> Iterator[Case]:
    """Products with weights, and attention."""
    for n, k in ((7168, 16384), (24576, 1536)):
        x, weight = fp8(tokens, k), fp8(n, k)
        x_scale = empty_scales(x).fill_(0.01)
        w_scale = torch.rand(n // 128, k // 128, device="cuda")
        out = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)
        num_bytes = weight.numel() + x.numel() + BF16 * out.numel()

        def library(deep_gemm: ModuleType, operands: tuple[Tensor, ...] = (
            x, x_scale, weight, w_scale, out
        )) -> Call:  # fmt: skip
            a, a_scale, b, b_scale, goal = operands
            return lambda: deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), goal)

        operands = (x, x_scale, weight, w_scale)
        yield Case(
            bench="fp8_gemm", name=f"triton m{tokens} n{n} k{k}", num_bytes=num_bytes,
            call=partial(fp8_gemm_triton.dense, *operands), library=library,
        )  # fmt: skip
        yield Case(
            bench="fp8_gemm", name=f"chosen m{tokens} n{n} k{k}", num_bytes=num_bytes,
            call=partial(fp8_gemm, *operands), library=library,
        )  # fmt: skip


def routed(tokens: int) -> Iterator[Case]:
    """All experts of a rank that has 32 of 256, and the tokens of 8 ranks."""
    num_experts, width = 32, 2048
    choices = torch.rand(8 * tokens, EXPERTS, device="cuda").topk(CHOICES).indices
    local = torch.where(choices < num_experts, choices, -1)
    hidden, weights = rows(8 * tokens, HIDDEN), torch.rand(local.shape, device="cuda")
    num_weights = 3 * num_experts * HIDDEN * width
    num_bytes = (1 + CHOICES / EXPERTS * num_experts) * hidden.numel() * BF16
    scales = [torch.rand(num_experts, n // 128, k // 128, device="cuda") * 1e-3
              for n, k in ((2 * width, HIDDEN), (HIDDEN, width))]  # fmt: skip
    quantised = Experts(
        gate_up=fp8(num_experts, 2 * width, HIDDEN), down=fp8(num_experts, HIDDEN, width),
        gate_up_scale=scales[0], down_scale=scales[1],
    )  # fmt: skip
    plain = Experts(gate_up=quantised.gate_up.bfloat16(), down=quantised.down.bfloat16())
    for name, experts, size in (("fp8", quantised, FP8), ("bf16", plain, BF16)):
        yield Case(
            bench="fused_moe", name=f"{name} m{tokens} x 8 e{num_experts} of {EXPERTS}",
            call=partial(fused_moe, hidden, local, weights, experts, scaling=2.5),
            num_bytes=num_bytes + size * num_weights,
        )  # fmt: skip


def attention() -> Iterator[Case]:
    for num_rows, length in ((128, 4096), (1, 4096)):
        query = rows(num_rows * HEADS, LATENT + ROPE).view(num_rows, HEADS, LATENT + ROPE)
        num_pages = num_rows * length // 64
        cache = rows(num_pages * 64, LATENT + ROPE).view(num_pages, 64, LATENT + ROPE)
        table = torch.randperm(num_pages, device="cuda").int().view(num_rows, -1)
        lengths = torch.full((num_rows,), length, dtype=torch.int32, device="cuda")
        operands = (query, cache, table, lengths)
        yield Case(
            bench="mla_decode", name=f"b{num_rows} heads{HEADS} kv{length}",
            call=partial(mla_decode_paged, *operands, value_dim=LATENT, scale=192**-0.5),
            num_bytes=BF16 * (cache.numel() + query.numel()),
        )  # fmt: skip


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from small(tokens)
    for tokens in (64, 4096):
        yield from large(tokens)
    for tokens in (16, 128):
        yield from routed(tokens)
    yield from attention()


def measure(runs: dict[str, Run]) -> Iterator[Record]:
    try:
        deep_gemm: ModuleType | None = importlib.import_module("deep_gemm")
    except ImportError:
        deep_gemm = None
    rate = copy_bytes_per_second()
    sys.stdout.write(f"copy: {rate / 1e12:.2f} TB/s\n")
    for case in cases():
        run = runs.setdefault(case.bench, Run.begin(case.bench))
        value = microseconds(case.call, 20)
        floor = 1e6 * case.num_bytes / rate
        peer, peer_value = "floor from bytes", floor
        if case.library is not None and deep_gemm is not None:
            peer, peer_value = "DeepGEMM", microseconds(case.library(deep_gemm), 20)
        yield run.record(case.name, "time", "us", value, peer=peer, peer_value=peer_value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels.")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    records = []
    for record in measure({}):
        records.append(record)
        assert record.peer_value is not None
        sys.stdout.write(
            f"{record.bench:14} {record.case:30} {record.value:8.1f} us   {record.peer}:"
            f" {record.peer_value:8.1f} us   {record.peer_value / record.value:5.2f}\n"
        )
        sys.stdout.flush()
    if not options.no_record:
        append(RESULTS / "kernels.jsonl", records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
