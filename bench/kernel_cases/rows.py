"""Operations whose time goes with the bytes of their tokens, at the sizes of DeepSeek-V3.

Data of few tokens stays in the second-level cache, as it does between the kernels of a step.
"""

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch

from bench.kernel_cases.case import (
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
    VOCABULARY,
    WIDTH,
    Case,
    Tensor,
    Tensors,
)
from bench.kernel_cases.gpu_timing import Call
from kernels.attention.rope_write import rope_write
from kernels.elementwise.combine import Combination, combine
from kernels.elementwise.quantise import quantise
from kernels.elementwise.rms_norm import (
    rms_norm,
    rms_norms,
)
from kernels.elementwise.silu_mul import silu_mul, silu_mul_quantise
from kernels.gemm.router_gemm import router_gemm
from kernels.moe import gate_triton
from kernels.moe.permute import permute
from kernels.moe.permute_masked import permute_masked
from kernels.sampling.sample import sample, sample_reference

TOKENS = (1, 128, 4096)
DECODED = 128  # rows of a step of decoding at most


def cases(make: Tensors) -> Iterator[Case]:
    for tokens in TOKENS:
        yield from _plain(make, tokens)
        yield from _norms(make, tokens)
        yield from _around_attention(make, tokens)
        yield from _around_experts(make, tokens)
    yield from _sampling(make)


def _plain(make: Tensors, tokens: int) -> Iterator[Case]:
    x, num = make.rows(tokens, HIDDEN), tokens * HIDDEN
    yield Case(
        bench="quantise", name=f"m{tokens} k{HIDDEN}", call=lambda: quantise(x),
        num_bytes=num * (BF16 + FP8),
    )  # fmt: skip
    both = make.rows(9 * tokens, 2 * WIDTH)
    yield Case(
        bench="silu_mul", name=f"m{9 * tokens} i{WIDTH}",
        call=lambda: silu_mul(both), num_bytes=both.numel() * 1.5 * BF16,
    )  # fmt: skip
    yield Case(
        bench="silu_mul", name=f"quantise m{9 * tokens} i{WIDTH}",
        call=lambda: silu_mul_quantise(both), num_bytes=both.numel() * (BF16 + FP8 / 2),
    )  # fmt: skip


def _norms(make: Tensors, tokens: int) -> Iterator[Case]:
    """Alone, after an addition, after the combination of what experts gave; the result in BF16,
    in FP8, in both, and with one given scale as well."""
    x, residual, weight = make.rows(tokens, HIDDEN), make.rows(tokens, HIDDEN), make.rows(HIDDEN)
    row_of = _row_of(make, _local_choices(make, tokens))
    combination = Combination(
        rows=make.rows(tokens * CHOICES, HIDDEN), row_of=row_of,
        weights=make.random(tokens, CHOICES), base=x,
    )  # fmt: skip
    static = make.full((), 0.01, torch.float32)
    added = (residual, weight, 1e-6)
    small = {"plain": False, "quantises": True}
    forms: dict[str, tuple[Call, float]] = {
        "": (partial(rms_norm, x, weight, 1e-6), 2 * BF16),
        "quantise ": (partial(rms_norms, x, None, weight, 1e-6, **small), BF16 + FP8),
        "add ": (partial(rms_norms, x, *added), 4 * BF16),
        "add quantise ": (partial(rms_norms, x, *added, **small), 3 * BF16 + FP8),
        "add both ": (partial(rms_norms, x, *added, quantises=True), 4 * BF16 + FP8),
        "add all ": (
            partial(rms_norms, x, *added, quantises=True, scale=static), 4 * BF16 + 2 * FP8,
        ),
        "combine add both ": (
            partial(rms_norms, combination, *added, quantises=True),
            (4 + CHOICES * LOCAL / EXPERTS) * BF16 + FP8,
        ),
    }  # fmt: skip
    for name, (call, size) in forms.items():
        yield Case(
            bench="rms_norm", name=f"{name}m{tokens} h{HIDDEN}", call=call,
            num_bytes=tokens * HIDDEN * size,
        )  # fmt: skip


def _around_attention(make: Tensors, tokens: int) -> Iterator[Case]:
    query = make.rows(tokens, HEADS, NOPE + ROPE)
    projected = make.rows(tokens, LATENT + ROPE)
    angles = make.random(tokens, ROPE // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    cache = make.rows(tokens // 64 + 1, 64, LATENT + ROPE)
    slots = make.permutation(tokens)
    yield Case(
        bench="rope_write", name=f"m{tokens} heads{HEADS}",
        call=lambda: rope_write(
            query, projected[:, :LATENT], projected[:, LATENT:], rotation, slots, cache
        ),
        num_bytes=BF16 * 2 * tokens * (HEADS * ROPE + LATENT + ROPE),
    )  # fmt: skip


def _around_experts(make: Tensors, tokens: int) -> Iterator[Case]:
    x, gate_weight, bias = (
        make.rows(tokens, HIDDEN),
        make.rows(EXPERTS, HIDDEN),
        make.random(EXPERTS),
    )
    yield Case(
        bench="router_gemm", name=f"m{tokens} n{EXPERTS} k{HIDDEN}",
        call=lambda: router_gemm(x, gate_weight),
        num_bytes=BF16 * (x.numel() + gate_weight.numel()) + 4 * tokens * EXPERTS,
        num_flops=2.0 * tokens * EXPERTS * HIDDEN,
    )  # fmt: skip
    logits = make.random(tokens, EXPERTS)
    choose = partial(
        gate_triton.launch, logits, bias, num_groups=8, groups_per_token=4,
        experts_per_token=CHOICES, norm_topk=True, scaling=2.5,
    )  # fmt: skip
    physical = torch.arange(EXPERTS, device=make.device).unsqueeze(1)
    counts = make.integers(EXPERTS)
    replicas = make.integers(EXPERTS) + 1
    yield Case(
        bench="gate", name=f"m{tokens} e{EXPERTS} top{CHOICES}",
        call=partial(choose, physical=physical, num_replicas=replicas, counts=counts),
        num_bytes=tokens * (4 * EXPERTS + 20 * CHOICES),
    )  # fmt: skip
    choices = _choices(make, tokens)
    local, weights = _local_choices(make, tokens), make.random(tokens, CHOICES)
    num_here = tokens * CHOICES * LOCAL / EXPERTS  # as many as can be expected
    yield Case(
        bench="permute", name=f"m{tokens} e{LOCAL} of {EXPERTS} h{HIDDEN}",
        call=lambda: permute(x, local, LOCAL), num_bytes=2 * num_here * HIDDEN * BF16,
    )  # fmt: skip
    if tokens <= DECODED:
        yield Case(
            bench="permute", name=f"masked quantise m{tokens} e{LOCAL} of {EXPERTS} h{HIDDEN}",
            call=lambda: permute_masked(x, choices, LOCAL, DECODED, quantises=True),
            num_bytes=HIDDEN * (tokens * BF16 + num_here * FP8),
        )  # fmt: skip
    rows = make.rows(tokens * CHOICES, HIDDEN)
    row_of = _row_of(make, local)
    yield Case(
        bench="combine", name=f"m{tokens} e{LOCAL} of {EXPERTS} h{HIDDEN}",
        call=lambda: combine(rows, row_of, weights, base=x),
        num_bytes=(num_here + 2 * tokens) * HIDDEN * BF16,
    )  # fmt: skip


def _choices(make: Tensors, tokens: int) -> Tensor:
    return make.random(tokens, EXPERTS).topk(CHOICES).indices


def _local_choices(make: Tensors, tokens: int) -> Tensor:
    """-1: elsewhere."""
    choices = _choices(make, tokens)
    return torch.where(choices < LOCAL, choices, -1)


def _row_of(make: Tensors, local: Tensor) -> Tensor:
    """[choices, tokens] int32: each has a row of its own."""
    numbers = torch.arange(local.numel(), device=make.device).view(local.shape)
    return torch.where(local < 0, -1, numbers).t().contiguous().int()


def _sampling(make: Tensors) -> Iterator[Case]:
    """Logits as peaked as those of a language model. The peer sorts."""
    for rows, top_p in ((1, 1.0), (64, 1.0), (64, 0.9), (256, 0.9)):
        logits = make.rows(rows, VOCABULARY).float() * 3
        knobs = (
            make.full((rows,), 1.0, torch.float32), make.full((rows,), 0, torch.int32),
            make.full((rows,), top_p, torch.float32), make.full((rows,), 0.0, torch.float32),
            make.random(rows).double(),
        )  # fmt: skip
        yield Case(
            bench="sample", name=f"b{rows} v{VOCABULARY} top_p {top_p:g}",
            call=partial(sample, logits, *knobs), num_bytes=4 * logits.numel(), package="torch",
            library=partial(_sorting, operands=(logits, *knobs)),
        )  # fmt: skip


def _sorting(_: ModuleType, operands: tuple[Tensor, ...]) -> Call:
    return partial(sample_reference, *operands)
