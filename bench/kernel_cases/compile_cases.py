"""Launches at the sizes of DeepSeek-V3, for `bench.compile_offline`: tensors without memory."""

from functools import partial

import torch

from bench.kernel_cases.case import (
    CHOICES,
    EXPERTS,
    HEADS,
    HIDDEN,
    LATENT,
    LOCAL,
    NOPE,
    ROPE,
    VOCABULARY,
    WIDTH,
)
from bench.kernel_cases.gpu_timing import Call
from kernels.attention import (
    absorb_query_triton,
    absorb_splits_triton,
    absorb_triton,
    mla_decode_triton,
    mla_prefill_triton,
    rope_write_triton,
)
from kernels.attention.mla_decode_splits import Splits
from kernels.attention.mla_prefill_plan import KeyGroup
from kernels.build.fp8_scales import empty_scales
from kernels.elementwise import (
    combine_triton,
    quantise_triton,
    rescale_triton,
    rms_norm_triton,
    silu_mul_triton,
)
from kernels.elementwise.combine import Combination
from kernels.gemm import (
    fp8_gemm_triton,
    grouped_linear_triton,
    router_gemm_triton,
)
from kernels.moe import (
    fused_moe_triton,
    gate_triton,
    pack_tokens_triton,
    permute_masked_triton,
    permute_triton,
    w4a8_grouped_gemm_packing_triton,
)
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, TRITON_SIZES
from kernels.sampling import sample_triton


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float8_e4m3fn)


def f32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def _dense(rows: int, n: int, k: int) -> Call:
    x = fp8(rows, k)
    operands = (x, empty_scales(x), fp8(n, k), f32(-(-n // 128), k // 128))
    return partial(fp8_gemm_triton.dense, operands)


def _masked(rows: int, capacity: int, n: int, k: int) -> Call:
    x = fp8(LOCAL, capacity, k)
    operands = (x, empty_scales(x), fp8(LOCAL, n, k), f32(LOCAL, n // 128, k // 128))
    return partial(fp8_gemm_triton.masked, operands, integers(LOCAL), rows)


def _contiguous(rows: int, n: int, k: int) -> Call:
    x = fp8(rows, k)
    operands = (x, empty_scales(x), fp8(LOCAL, n, k), f32(LOCAL, n // 128, k // 128))
    return partial(fp8_gemm_triton.contiguous, operands, integers(rows))


def _fused_moe(tokens: int, dtype: torch.dtype) -> Call:
    shapes = ((LOCAL, 2 * WIDTH, HIDDEN), (LOCAL, HIDDEN, WIDTH))
    weights = [empty(*shape, dtype=dtype) for shape in shapes]
    scales = [f32(e, n // 128, k // 128) for e, n, k in shapes]
    is_fp8 = dtype == torch.float8_e4m3fn
    experts = FusedExperts(
        gate_up=weights[0], down=weights[1], gate_up_scale=scales[0] if is_fp8 else None,
        down_scale=scales[1] if is_fp8 else None,
    )  # fmt: skip
    topk_idx = integers(tokens, CHOICES, dtype=torch.int64)
    return partial(
        fused_moe_triton.launch, empty(tokens, HIDDEN), topk_idx, f32(tokens, CHOICES), experts
    )


def _gate(tokens: int) -> Call:
    return partial(
        gate_triton.launch, f32(tokens, EXPERTS), f32(EXPERTS), num_groups=8, groups_per_token=4,
        experts_per_token=CHOICES, norm_topk=True, scaling=2.5,
        physical=integers(EXPERTS, 2, dtype=torch.int64),
        num_replicas=integers(EXPERTS, dtype=torch.int64),
        counts=integers(EXPERTS, dtype=torch.int64), first=3,
        is_row=empty(tokens, dtype=torch.bool),
    )  # fmt: skip


def _mla_decode(rows: int, queries: int, pages: int, page_tokens: int = 64) -> Call:
    width = LATENT + ROPE
    return partial(
        mla_decode_triton.launch, empty(rows * queries, HEADS, width),
        empty(pages, page_tokens, width),
        integers(rows, pages), integers(rows), value_dim=LATENT, scale=0.07,
    )  # fmt: skip


def _splits(rows: int) -> Splits:
    parts = 66
    return Splits(
        values=empty(rows + parts, HEADS, LATENT), lse=f32(rows + parts, HEADS),
        kv_lengths=integers(rows), num_parts=parts, min_tiles=2, num_queries=1,
    )  # fmt: skip


def _mla_prefill(tokens: int, keys: int) -> Call:
    group = KeyGroup(integers(keys), (), integers(-(-tokens // 128), 6), integers(2))
    return partial(
        mla_prefill_triton.launch, empty(tokens, HEADS, NOPE + ROPE), empty(keys, HEADS, 2 * NOPE),
        empty(keys, LATENT + ROPE)[:, LATENT:], group, empty(tokens, HEADS, NOPE),
        f32(tokens, HEADS), scale=0.07,
    )  # fmt: skip


def _w4a8_packing(n: int, k: int) -> Call:
    blocks = integers(8, n // 128, k // 128, BLOCK_BYTES, dtype=torch.uint8)
    nibbles = integers(8, n, k // 2, dtype=torch.int8)
    operands = blocks, nibbles, f32(8, n, k // 128)
    return partial(w4a8_grouped_gemm_packing_triton.launch, *operands, **TRITON_SIZES)


def _rope_write(tokens: int) -> Call:
    projected = empty(tokens, LATENT + ROPE)
    return partial(
        rope_write_triton.launch, empty(tokens, HEADS, NOPE + ROPE), projected[:, :LATENT],
        projected[:, LATENT:], empty(tokens, ROPE // 2, dtype=torch.complex64),
        integers(tokens, dtype=torch.int64), empty(100, 64, LATENT + ROPE),
        latent_norm=empty(LATENT), eps=1e-6,
    )  # fmt: skip


def _absorb_query(tokens: int) -> Call:
    projected = empty(tokens, LATENT + ROPE)
    return partial(
        absorb_query_triton.launch, empty(tokens, HEADS, NOPE + ROPE), projected[:, :LATENT],
        projected[:, LATENT:], empty(tokens, ROPE // 2, dtype=torch.complex64),
        integers(tokens, dtype=torch.int64), empty(100, 64, LATENT + ROPE),
        empty(HEADS, 2 * NOPE, LATENT), latent_norm=empty(LATENT), eps=1e-6,
    )  # fmt: skip


def _norm_of_a_combination(tokens: int) -> Call:
    x = Combination(
        rows=empty(LOCAL * tokens, HIDDEN), row_of=integers(CHOICES, tokens),
        weights=f32(tokens, CHOICES), base=empty(tokens, HIDDEN),
    )  # fmt: skip
    return partial(
        rms_norm_triton.launch, x, empty(tokens, HIDDEN), empty(HIDDEN), 1e-6, quantises=True
    )


def _permute(dtype: torch.dtype) -> Call:
    hidden = empty(128, HIDDEN, dtype=dtype)
    scale = empty_scales(hidden) if dtype == torch.float8_e4m3fn else None
    topk_idx = integers(128, CHOICES, dtype=torch.int64)
    return partial(permute_triton.launch, hidden, topk_idx, LOCAL, 128, scale)


def _permute_masked(rows: int, dtype: torch.dtype, *, quantises: bool = False) -> Call:
    hidden = empty(rows, HIDDEN, dtype=dtype)
    scale = empty_scales(hidden) if dtype == torch.float8_e4m3fn else None
    return partial(
        permute_masked_triton.launch, hidden, integers(rows, CHOICES), LOCAL, rows, LOCAL, scale,
        quantises=quantises,
    )  # fmt: skip


def _grouped_linear(dtype: torch.dtype, rows: int) -> Call:
    x, weight = empty(LOCAL, 512, HIDDEN, dtype=dtype), empty(LOCAL, 4096, HIDDEN, dtype=dtype)
    return partial(grouped_linear_triton.masked, x, integers(LOCAL), weight, rows)


def _sample(rows: int) -> Call:
    knobs = (f32(rows), integers(rows), f32(rows), f32(rows), empty(rows, dtype=torch.float64))
    return partial(sample_triton.launch, f32(rows, VOCABULARY), *knobs)


def _around_rows() -> dict[str, Call]:
    x = empty(128, HIDDEN)
    both = empty(1152, 2 * WIDTH)
    masked = empty(LOCAL, 512, 2 * WIDTH)
    return {
        "quantise": partial(quantise_triton.launch, x),
        "quantise masked": partial(
            quantise_triton.launch, masked, integers(LOCAL)
        ),
        "rms_norm": partial(rms_norm_triton.launch, x, x, empty(HIDDEN), 1e-6),
        "rms_norm quantise": partial(
            rms_norm_triton.launch, x, x, empty(HIDDEN), 1e-6, plain=False, quantises=True
        ),
        "rms_norm all": partial(
            rms_norm_triton.launch, x, x, empty(HIDDEN), 1e-6, quantises=True, scale=f32(1)
        ),
        "silu_mul": partial(silu_mul_triton.launch, both),
        "silu_mul quantise": partial(
            silu_mul_triton.launch_quantise, both
        ),
        "silu_mul quantise by a scale": partial(
            silu_mul_triton.launch_quantise, both, scale=f32(1)
        ),
        "silu_mul quantise masked": partial(
            silu_mul_triton.launch_quantise, masked, integers(LOCAL)
        ),
        "rms_norm combination few": _norm_of_a_combination(128),
        "rms_norm combination": _norm_of_a_combination(4096),
        "rope_write": _rope_write(128),
        "absorb_query few": _absorb_query(1),
        "absorb_query": _absorb_query(128),
        "gate": _gate(128),
        "sample": _sample(64),
        "silu_mul masked": partial(silu_mul_triton.launch, masked, integers(LOCAL)),
    }  # fmt: skip


def _between_ranks() -> dict[str, Call]:
    """Rows as they travel, and in the order of their experts."""
    x, choices, rows = empty(128, HIDDEN), f32(128, CHOICES), fp8(LOCAL, 512, HIDDEN)
    pack = partial(pack_tokens_triton.launch, x, integers(128, CHOICES), choices)
    return {
        "pack_tokens fp8": partial(pack, 128, quantises=True),
        "pack_tokens by a scale": partial(pack, 128, quantises=True, scale=f32(1)),
        "pack_tokens bf16": partial(pack, 200, quantises=False),
        "permute_masked bf16": _permute_masked(512, torch.bfloat16),
        "permute_masked fp8": _permute_masked(512, torch.float8_e4m3fn),
        "permute_masked few bf16": _permute_masked(128, torch.bfloat16),
        "permute_masked few fp8": _permute_masked(128, torch.float8_e4m3fn),
        "permute_masked quantise": _permute_masked(128, torch.bfloat16, quantises=True),
        "permute many": partial(
            permute_triton.launch, empty(4096, HIDDEN),
            integers(4096, CHOICES, dtype=torch.int64), LOCAL, 128, None,
        ),
        "permute bf16": _permute(torch.bfloat16),
        "permute fp8": _permute(torch.float8_e4m3fn),
        "w4a8 packing": _w4a8_packing(WIDTH, HIDDEN),
        "rescale": partial(
            rescale_triton.launch, rows, empty_scales(rows), f32(1), integers(LOCAL)
        ),
        "combine": partial(
            combine_triton.launch, x, integers(CHOICES, 128), choices, x
        ),
    }  # fmt: skip


def _products() -> dict[str, Call]:
    cases: dict[str, Call] = {}
    for rows in (1, 16, 128, 4096):
        cases[f"router_gemm m{rows}"] = partial(
            router_gemm_triton.launch, empty(rows, HIDDEN), empty(EXPERTS, HIDDEN)
        )
    for rows in (1, 16, 64, 128, 512, 4096):
        for n, k in ((7168, 16384), (24576, 1536)):
            cases[f"fp8_gemm dense m{rows} n{n} k{k}"] = _dense(rows, n, k)
    for rows in (8, 64, 256):
        cases[f"fp8_gemm masked m{rows} n4096 k7168"] = _masked(rows, 512, 4096, HIDDEN)
    cases["fp8_gemm contiguous n4096 k7168"] = _contiguous(4096, 4096, HIDDEN)
    for rows in (4, 64, 256):
        cases[f"grouped_linear masked m{rows}"] = _grouped_linear(torch.bfloat16, rows)
    cases["grouped_linear masked float32"] = _grouped_linear(torch.float32, 64)
    cases["grouped_linear aligned"] = partial(
        grouped_linear_triton.aligned, empty(4096, HIDDEN), integers(4096),
        empty(LOCAL, 4096, HIDDEN),
    )  # fmt: skip
    for tokens in (16, 128, 1024, 8192):
        cases[f"fused_moe bf16 m{tokens}"] = _fused_moe(tokens, torch.bfloat16)
        cases[f"fused_moe fp8 m{tokens}"] = _fused_moe(tokens, torch.float8_e4m3fn)
    for tokens in (1, 128):
        cases[f"absorb m{tokens}"] = partial(
            absorb_triton.launch, empty(tokens, HEADS, LATENT),
            empty(HEADS, 2 * NOPE, LATENT), NOPE,
        )  # fmt: skip
    for rows in (1, 8, 16):
        cases[f"absorb splits b{rows}"] = partial(
            absorb_splits_triton.launch, _splits(rows), empty(HEADS, 2 * NOPE, LATENT), NOPE
        )
    for rows in (1, 128):
        cases[f"join splits b{rows}"] = partial(mla_decode_triton.join_splits, _splits(rows))
    cases["mla_decode b128 pages of 32"] = _mla_decode(128, 1, 64, 32)
    cases["mla_decode b1 q1"] = _mla_decode(1, 1, 64)
    cases["mla_decode b128 q1"] = _mla_decode(128, 1, 64)
    cases["mla_decode b16 q4"] = _mla_decode(16, 4, 64)
    cases["mla_prefill m4096"] = _mla_prefill(4096, 4096)
    return cases


CASES = _around_rows() | _between_ranks() | _products()
