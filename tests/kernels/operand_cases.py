"""Calls of every operation with operands that fit, as small as they can be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from kernels.attention.absorb import absorb_values
from kernels.attention.absorb_query import absorb_query
from kernels.attention.mla_decode import mla_decode_paged
from kernels.attention.mla_prefill import mla_prefill, mla_prefill_grouped, mla_prefill_quantised
from kernels.attention.mla_prefill_plan import plan_groups
from kernels.attention.paged_rows import split_rows
from kernels.attention.rope_write import rope, rope_write
from kernels.elementwise.combine import Combination, combine
from kernels.elementwise.quantise import quantise
from kernels.elementwise.rescale import rescale
from kernels.elementwise.rms_norm import rms_norm, rms_norms
from kernels.elementwise.silu_mul import (
    silu_mul,
    silu_mul_quantise,
)
from kernels.gemm.block_dequantise import block_dequantise
from kernels.gemm.fp8_gemm import fp8_gemm
from kernels.gemm.grouped_linear import (
    grouped_linear,
    grouped_linear_aligned,
    grouped_linear_masked,
)
from kernels.gemm.head_linear import head_linear
from kernels.gemm.linear import linear
from kernels.gemm.router_gemm import router_gemm
from kernels.moe.choose_replica import choose_replica
from kernels.moe.fp8_grouped_gemm import fp8_grouped_gemm_contiguous, fp8_grouped_gemm_masked
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import fused_moe
from kernels.moe.gate import count_experts, gate, route
from kernels.moe.pack_tokens import pack_tokens
from kernels.moe.permute import permute
from kernels.moe.permute_masked import permute_masked
from kernels.moe.w4a8_grouped_gemm import w4a8_grouped_gemm_contiguous, w4a8_grouped_gemm_masked
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, PackedWeights
from kernels.sampling.sample import sample

TOKENS, EXPERTS, CHOICES, HEADS = 6, 4, 2, 3
NOPE, ROPE, VALUE, LATENT = 6, 4, 5, 8
PAGES, PAGE_TOKENS = 3, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """`free`: dimensions of operands that others do not fix."""

    call: Callable[..., object]
    operands: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    free: frozenset[tuple[str, int]] = frozenset()

    def run(self, **others: object) -> object:
        return self.call(**{**self.operands, **self.options, **others})


def floats(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, prod(shape)).reshape(shape)


def ids(*shape: int, below: int = EXPERTS, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return (torch.arange(prod(shape)) % below).to(dtype).reshape(shape)


def fp8(*shape: int) -> torch.Tensor:
    return floats(*shape).to(torch.float8_e4m3fn)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of_experts() -> dict[str, Case]:
    hidden, chosen = floats(TOKENS, 256), ids(TOKENS, CHOICES)
    weights = floats(TOKENS, CHOICES)
    moved = {"hidden": fp8(TOKENS, 256), "topk_idx": chosen, "scale": floats(TOKENS, 2)}
    row_of = ids(CHOICES, TOKENS, below=5, dtype=torch.int32)
    sums = {"rows": floats(5, 256), "row_of": row_of, "weights": weights}
    return {
        "permute": Case(
            call=permute, operands=moved, options={"num_experts": EXPERTS},
            free=frozenset({("topk_idx", 1)}),
        ),
        "permute_masked": Case(
            call=permute_masked, operands=moved,
            options={"num_experts": EXPERTS, "capacity": TOKENS},
            free=frozenset({("topk_idx", 1)}),
        ),
        "pack_tokens": Case(
            call=pack_tokens,
            operands={"hidden": hidden, "topk_idx": chosen, "weights": weights},
            options={"num_rows": TOKENS, "quantises": False}, free=frozenset({("hidden", 1)}),
        ),
        "combine": Case(
            call=combine, operands=sums | {"base": floats(TOKENS, 256)},
        ),
        "combination": Case(
            call=Combination, operands=sums | {"base": floats(TOKENS, 256)},
        ),
        "count_experts": Case(
            call=count_experts,
            operands={"topk_idx": chosen, "counts": torch.zeros(EXPERTS, dtype=torch.int64)},
            free=frozenset({("topk_idx", 0), ("topk_idx", 1)}),
        ),
        "choose_replica": Case(
            call=choose_replica,
            operands={
                "topk_idx": chosen, "physical": ids(EXPERTS, 2),
                "num_replicas": torch.tensor([1, 2, 2, 1]),
            },
            options={"first": 3}, free=frozenset({("topk_idx", 0), ("topk_idx", 1)}),
        ),
    }  # fmt: skip


def gates() -> dict[str, Case]:
    rule = {
        "num_groups": 2, "groups_per_token": 1, "experts_per_token": 2, "norm_topk": True,
        "scaling": 1.0,
    }  # fmt: skip
    operands = {
        "hidden": floats(TOKENS, 8), "weight": floats(EXPERTS, 8), "bias": floats(EXPERTS),
    }  # fmt: skip
    tables = {
        "physical": ids(EXPERTS, 2), "num_replicas": torch.tensor([1, 2, 2, 1]),
        "counts": torch.zeros(EXPERTS, dtype=torch.int64),
        "is_row": torch.ones(TOKENS, dtype=torch.bool),
    }  # fmt: skip
    free = frozenset({("hidden", 0)})
    return {
        "gate": Case(call=gate, operands=operands, options=rule, free=free),
        "route": Case(call=route, operands=operands | tables, options=rule | {"first": 0}),
        "router_gemm": Case(
            call=router_gemm, operands={"hidden": floats(TOKENS, 8), "weight": floats(EXPERTS, 8)},
            free=free | {("weight", 0)},
        ),
    }  # fmt: skip


def products() -> dict[str, Case]:
    x, scale = fp8(TOKENS, 256), floats(TOKENS, 2)
    weight, w_scale = fp8(EXPERTS, 128, 256), floats(EXPERTS, 1, 2)
    masked = {"x": fp8(EXPERTS, 3, 256), "x_scale": floats(EXPERTS, 3, 2)}
    counts = numbers(1, 0, 3, 2)
    aligned = {"x": fp8(256, 256), "x_scale": floats(256, 2)}
    expert_of, ends = numbers(1, 3).repeat_interleave(128), numbers(0, 128, 128, 256)
    of_experts = {"weight": weight, "w_scale": w_scale}
    plain = floats(EXPERTS, 7, 8)
    packed = torch.zeros(EXPERTS, 1, 2, BLOCK_BYTES, dtype=torch.uint8)
    n_of_w = frozenset({("weight", 1)})
    return {
        "linear": Case(
            call=linear,
            operands={"x": floats(TOKENS, 8), "weight": plain[0], "bias": floats(7)},
            free=frozenset({("x", 0)}),
        ),
        "head_linear": Case(
            call=head_linear,
            operands={"x": floats(TOKENS, HEADS, 8), "weight": floats(HEADS, 7, 8),
                      "out": floats(TOKENS, HEADS, 7)},
        ),
        "grouped_linear": Case(
            call=grouped_linear, operands={"x": floats(TOKENS, 8), "weight": plain},
            options={"counts": [1, 0, 3, 2]}, free=n_of_w,
        ),
        "grouped_linear_masked": Case(
            call=grouped_linear_masked,
            operands={"x": floats(EXPERTS, 3, 8), "weight": plain, "counts": counts},
            free=frozenset({("x", 1)}) | n_of_w,
        ),
        "grouped_linear_aligned": Case(
            call=grouped_linear_aligned,
            operands={"x": floats(256, 8), "weight": plain, "expert_of": expert_of}, free=n_of_w,
        ),
        "fp8_gemm": Case(
            call=fp8_gemm,
            operands={"x": x, "x_scale": scale, "weight": weight[0], "w_scale": w_scale[0]},
            free=frozenset({("weight", 0)}),
        ),
        "fp8_grouped_gemm_masked": Case(
            call=fp8_grouped_gemm_masked, operands=masked | of_experts | {"counts": counts},
            free=n_of_w,
        ),
        "fp8_grouped_gemm_contiguous": Case(
            call=fp8_grouped_gemm_contiguous,
            operands=aligned | of_experts | {"expert_of": expert_of, "ends": ends}, free=n_of_w,
        ),
        "w4a8_masked": Case(
            call=lambda activations, activation_scales, blocks, counts: w4a8_grouped_gemm_masked(
                activations, activation_scales, PackedWeights(blocks), counts
            ),
            operands={"activations": masked["x"], "activation_scales": masked["x_scale"],
                      "blocks": packed, "counts": counts},
            free=frozenset({("blocks", 1), ("activation_scales", 2)}),
        ),
        "w4a8_contiguous": Case(
            call=lambda activations, activation_scales, blocks, counts: (
                w4a8_grouped_gemm_contiguous(
                    activations, activation_scales, PackedWeights(blocks), counts
                )
            ),
            operands={"activations": x, "activation_scales": scale, "blocks": packed,
                      "counts": counts},
            free=frozenset({("blocks", 1), ("activation_scales", 1)}),
        ),
        "fused_moe": Case(
            call=lambda hidden, topk_idx, topk_weights, **weights: fused_moe(
                hidden, topk_idx, topk_weights, FusedExperts(**weights)
            ),
            operands={
                "hidden": floats(TOKENS, 256), "topk_idx": ids(TOKENS, CHOICES),
                "topk_weights": floats(TOKENS, CHOICES), "gate_up": fp8(EXPERTS, 256, 256),
                "down": fp8(EXPERTS, 256, 128), "gate_up_scale": floats(EXPERTS, 2, 2),
                "down_scale": floats(EXPERTS, 2, 1),
            },
        ),
        "block_dequantise": Case(
            call=block_dequantise, operands={"weight": weight[0], "scale_inv": w_scale[0]},
            options={"dtype": torch.float32}, free=frozenset({("weight", 0), ("weight", 1)}),
        ),
    }  # fmt: skip


def around_products() -> dict[str, Case]:
    x, counts = floats(EXPERTS, 3, 256), numbers(1, 0, 3, 2)
    one = torch.tensor(0.5)
    norm = {"x": floats(TOKENS, 128), "residual": floats(TOKENS, 128), "weight": floats(128)}
    every_row = frozenset({("x", 0)})
    return {
        "quantise": Case(call=quantise, operands={"x": x[0], "scale": one}, free=every_row),
        "rescale": Case(
            call=rescale,
            operands={"x": fp8(EXPERTS, 3, 256), "scale": floats(EXPERTS, 3, 2),
                      "tensor_scale": one, "counts": counts},
        ),
        "rms_norm": Case(
            call=rms_norm, operands={"x": norm["x"], "weight": norm["weight"]},
            options={"eps": 1e-6}, free=every_row,
        ),
        "rms_norms": Case(call=rms_norms, operands=norm, options={"eps": 1e-6}),
        "rms_norms_all": Case(
            call=rms_norms,
            operands=norm | {"scale": one},
            options={"eps": 1e-6, "quantises": True},
        ),
        "silu_mul": Case(call=silu_mul, operands={"x": x[0]}, free=every_row),
        "silu_mul_masked": Case(
            call=silu_mul, operands={"x": x, "counts": counts},
            free=frozenset({("x", 1)}),
        ),
        "silu_mul_quantise": Case(
            call=silu_mul_quantise, operands={"x": x[0], "owner": numbers(1, -1, 0), "scale": one},
        ),
        "silu_mul_quantise_masked": Case(
            call=silu_mul_quantise, operands={"x": x, "counts": counts, "scale": one},
            free=frozenset({("x", 1)}),
        ),
        "sample": Case(
            call=sample,
            operands={
                "logits": floats(TOKENS, 9), "temperature": floats(TOKENS).abs(),
                "top_k": ids(TOKENS, dtype=torch.int32), "top_p": floats(TOKENS).abs(),
                "min_p": floats(TOKENS).abs(), "uniform": torch.full((TOKENS,), 0.5).double(),
            },
            free=frozenset({("logits", 1)}),
        ),
    }  # fmt: skip


def attention() -> dict[str, Case]:
    query, latent = floats(TOKENS, HEADS, NOPE + ROPE), floats(TOKENS, LATENT)
    cache = floats(PAGES, PAGE_TOKENS, LATENT + ROPE)
    rotation = torch.polar(torch.ones(TOKENS, ROPE // 2), floats(TOKENS, ROPE // 2))
    slots, kv_b = ids(TOKENS, below=12), floats(HEADS, NOPE + VALUE, LATENT)
    tokens = {
        "query": query, "latent": latent, "key_rope": floats(TOKENS, ROPE), "rotation": rotation,
        "slots": slots, "cache": cache, "latent_norm": floats(LATENT),
    }  # fmt: skip
    table, lengths = numbers(0, 1, 2, 0).view(2, 2), numbers(8, 5)
    rows = split_rows(numbers(0, 4, 6), lengths, table, PAGE_TOKENS)
    groups = plan_groups(rows, PAGE_TOKENS, 100, torch.device("cpu"))
    prefill = {"query": query, "cache": cache, "kv_b": kv_b}
    # Where a key ends is where its value begins: nobody knows more than their sum.
    sizes = frozenset({("query", 2), ("kv_b", 1), ("kv_b", 2), ("cache", 2)})
    wide = floats(HEADS, 6 + 128, LATENT)
    return {
        "rope": Case(
            call=rope, operands={"x": floats(TOKENS, HEADS, ROPE), "rotation": rotation},
            free=frozenset({("x", 1)}),
        ),
        "rope_write": Case(
            call=rope_write,
            operands=tokens | {"rotated": floats(TOKENS, HEADS, ROPE)}, options={"eps": 1e-6},
            free=frozenset({("query", 2), ("cache", 0), ("cache", 1)}),
        ),
        "absorb_query": Case(
            call=absorb_query, operands=tokens | {"kv_b": kv_b}, options={"eps": 1e-6},
            free=frozenset({("query", 2), ("cache", 0), ("cache", 1), ("kv_b", 1)}),
        ),
        "absorb_values": Case(
            call=absorb_values,
            operands={"latents": floats(TOKENS, HEADS, LATENT), "kv_b": wide},
            options={"nope_dim": 6}, free=frozenset({("latents", 0)}),
        ),
        "mla_decode_paged": Case(
            call=mla_decode_paged,
            operands={"query": floats(2, HEADS, LATENT + ROPE), "cache": cache,
                      "block_table": table, "kv_lengths": lengths},
            options={"value_dim": LATENT, "scale": 0.3},
            free=frozenset({("query", 1), ("cache", 0), ("cache", 1)}),
        ),
        "mla_prefill": Case(
            call=mla_prefill, operands=prefill, options={"rows": rows, "scale": 0.3}, free=sizes
        ),
        "mla_prefill_grouped": Case(
            call=mla_prefill_grouped, operands=prefill | {"out": floats(TOKENS, HEADS, VALUE)},
            options={"groups": groups, "scale": 0.3},
        ),
        "mla_prefill_quantised": Case(
            call=mla_prefill_quantised,
            operands=prefill | {"kv_b": floats(HEADS, NOPE + 128, LATENT)},
            options={"groups": groups, "scale": 0.3}, free=sizes,
        ),
    }  # fmt: skip


CASES = rows_of_experts() | gates() | products() | around_products() | attention()
