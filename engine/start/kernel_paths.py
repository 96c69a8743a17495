"""Which paths the operations of a rank take: a line that it logs at start.

    kernel_paths(model, device, form, page_tokens=64, most_tokens=128)
    {"fp8_gemm": "cuda+deep_gemm", "mla_decode": "cuda", "rms_norm": "triton", ...}

The functions that choose are asked, for each size that a pass or step of this model can have; where
several paths share an operation's sizes all are named. Operands are given as `meta` tensors, which
have shapes and no memory. Products and attention that this rank has no use for are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.attention import absorb, absorb_query, mla_decode, mla_prefill
from kernels.attention.mla_decode_pieces import MAX_QUERIES, Pieces
from kernels.attention.mla_prefill_plan import max_keys
from kernels.build.aligned_rows import ALIGNMENT
from kernels.build.fp8_scales import empty_scales
from kernels.build.paths import OPERATIONS, path_of
from kernels.gemm import fp8_gemm, head_linear, router_gemm
from kernels.moe.fp8_grouped_gemm import masked_path
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from model.experts import ExpertWeights
from model.fp8_experts import Fp8Experts
from model.int4_experts import Int4Experts
from model.mlp import Mlp

SMALL = 256  # up to which choices change from one number of tokens to the next
STEP = 64  # of larger numbers that are asked for


def kernel_paths(
    model: DeepseekV3,
    device: torch.device,
    form: AttentionForm,
    *,
    page_tokens: int,
    most_tokens: int,
) -> dict[str, str]:
    """By operation; the names of several paths are joined by +. `most_tokens` of a pass, or rows
    of a decode step."""
    best = {operation: path_of(operation, device) for operation in OPERATIONS}
    if set(best.values()) == {"reference"}:
        most_tokens = 1  # whatever the size, there is one path
    rank = _Rank(model, device, form, page_tokens, most_tokens)
    found = {operation: {path} for operation, path in best.items()} | rank.by_size()
    return {
        operation: "+".join(sorted(paths)) for operation, paths in sorted(found.items()) if paths
    }


@dataclass(frozen=True, slots=True)
class _Rank:
    """What `kernel_paths` is asked about."""

    model: DeepseekV3
    device: torch.device
    form: AttentionForm
    page_tokens: int
    most_tokens: int

    def by_size(self) -> dict[str, set[str]]:
        """Nothing for operations without a use."""
        return self.of_experts() | {
            "absorb": self.absorb(),
            "fp8_gemm": self.fp8_gemm(),
            "head_linear": {head_linear.path_for(self.device, self.kv_b, None)},
            "mla_decode": self.mla_decode(),
            "mla_prefill": self.mla_prefill(),
            "router_gemm": self.router_gemm(),
        }

    def of_experts(self) -> dict[str, set[str]]:
        """What one of its kinds of experts is computed by."""
        kinds = {(type(moe.experts), moe.fused) for moe in self.model.moe_layers}
        has_int4 = (Int4Experts, False) in kinds
        best = path_of("w4a8_grouped_gemm", self.device)
        return {
            "fp8_grouped_gemm": self.fp8_grouped_gemm(),
            "fused_moe": {path_of("fused_moe", self.device) for _, fused in kinds if fused},
            "grouped_linear": {
                path_of("grouped_linear", self.device)
                for kind, fused in kinds
                if kind is ExpertWeights and not fused
            },
            # NOTE: where its library cannot be built these experts, and this rank, do not start.
            "w4a8_grouped_gemm": {best} if has_int4 else set(),
        }

    @property
    def kv_b(self) -> torch.Tensor:
        return self.model.layers[0].attention.kv_b

    def absorb(self) -> set[str]:
        """Of decode steps only."""
        if self.form is AttentionForm.PLAIN:
            return set()
        config, device = self.model.config, self.device
        quantises = any(layer.attention.out.is_fp8 for layer in self.model.layers)
        paths = set()
        for rows in token_counts(self.most_tokens):
            query = self.empty(rows, config.num_heads, config.qk_head_dim)
            key_rope = self.empty(rows, config.qk_rope_head_dim)
            paths.add(absorb_query.path_for(device, query, key_rope, self.kv_b))
            if quantises:
                latents = self.attended(rows)
                paths.add(absorb.path_for(device, latents, self.kv_b, config.qk_nope_head_dim))
        return paths

    def attended(self, rows: int) -> torch.Tensor | Pieces:
        """What `mla_decode_pieces` leaves of a decode step."""
        config = self.model.config
        latents = self.empty(rows, config.num_heads, config.kv_lora_rank)
        if self.mla_decode_path(rows, 1) != "cuda":
            return latents
        return Pieces(
            values=latents,
            lse=self.empty(rows, config.num_heads),
            kv_lengths=self.empty(rows),
            num_parts=1,
            min_tiles=1,
            num_queries=1,
        )

    def mla_decode(self) -> set[str]:
        """Of several new tokens a row in prefill passes only, filled up to powers of two."""
        num_queries, paths = 1, set()
        while num_queries <= min(MAX_QUERIES, self.most_tokens):
            most_rows = self.most_tokens // num_queries
            paths |= {self.mla_decode_path(rows, num_queries) for rows in token_counts(most_rows)}
            if self.form is AttentionForm.ABSORBED:
                break
            num_queries *= 2
        return paths

    def mla_decode_path(self, rows: int, num_queries: int) -> str:
        config = self.model.config
        query = self.empty(rows * num_queries, config.num_heads, config.kv_dim)
        cache = self.empty(1, self.page_tokens, config.kv_dim)
        given = self.device, query, cache, config.kv_lora_rank
        return mla_decode.path_for(*given, num_rows=rows)

    def mla_prefill(self) -> set[str]:
        if self.form is AttentionForm.ABSORBED:
            return set()
        config = self.model.config
        query = self.empty(1, config.num_heads, config.qk_head_dim)
        cache = self.empty(1, self.page_tokens, config.kv_dim)
        expanding = (layer.attention.expanding_kv_b[0] for layer in self.model.layers)
        return {mla_prefill.path_for(self.device, query, cache, kv_b) for kv_b in expanding}

    def router_gemm(self) -> set[str]:
        """None where the gate's weights are float32, whose product is torch's."""
        gates = [moe.gate_weight for moe in self.model.moe_layers]
        hidden = self.model.embedding.dtype
        if hidden == torch.float32 or not any(gate.dtype == hidden for gate in gates):
            return set()
        return {
            router_gemm.path_for(self.device, self.empty(rows, gates[0].shape[1]), gates[0])
            for rows in token_counts(self.most_tokens)
        }

    def fp8_gemm(self) -> set[str]:
        paths = set()
        for (n, k), most in self.fp8_products().items():
            weight = self.empty(n, k, dtype=torch.float8_e4m3fn)
            for rows in token_counts(most):
                x = self.empty(rows, k, dtype=torch.float8_e4m3fn)
                paths.add(fp8_gemm.path_for(self.device, x, empty_scales(x), weight))
        return paths

    def fp8_products(self) -> dict[tuple[int, int], int]:
        """By [N, K] of weights, the most rows that they are multiplied with."""
        most = dict.fromkeys(self.fp8_weights(), self.most_tokens)
        if self.form is AttentionForm.PLAIN and self.most_tokens > 1:
            config = self.model.config
            width = config.qk_nope_head_dim + config.v_head_dim
            keys = max_keys(config.num_heads, width, self.model.embedding.itemsize)
            for layer in self.model.layers:
                if layer.attention.stored_kv_b is not None:
                    most[layer.attention.stored_kv_b.weight.shape] = keys
        return most

    def fp8_weights(self) -> Iterator[tuple[int, int]]:
        projections = [self.model.head]
        for layer in self.model.layers:
            attention, mlp = layer.attention, layer.mlp
            projections += [attention.q_kv_a, attention.out]
            projections += [attention.q_b] if attention.q_b is not None else []
            shared = mlp if isinstance(mlp, Mlp) else mlp.shared
            if shared is not None:
                projections += [shared.gate_up, shared.down]
            elif isinstance(mlp, Mlp):
                continue
            elif isinstance(mlp.experts, Fp8Experts) and mlp.experts.folds_shared:
                yield from (each.shape[1:] for each in (mlp.experts.gate_up, mlp.experts.down))
        yield from (each.weight.shape for each in projections if each.is_fp8)

    def fp8_grouped_gemm(self) -> set[str]:
        """Masked in decode steps of fixed sizes, whose capacity is a multiple of ALIGNMENT;
        contiguous in all other passes."""
        used = [
            moe.experts
            for moe in self.model.moe_layers
            if isinstance(moe.experts, Fp8Experts) and not moe.fused
        ]
        paths = {path_of("fp8_grouped_gemm", self.device)} if used else set()
        if used and self.form is AttentionForm.ABSORBED:
            paths |= {
                masked_path(self.device, rows, ALIGNMENT, *stack.shape[1:])
                for rows in token_counts(self.most_tokens)
                for stack in (used[0].gate_up, used[0].down)
            }
        return paths

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of the type that the model computes with, unless told otherwise."""
        return torch.empty(shape, dtype=dtype or self.model.embedding.dtype, device="meta")


def token_counts(most: int) -> list[int]:
    """Those among 1 to `most` that stand for all."""
    return sorted({*range(1, min(most, SMALL) + 1), *range(SMALL, most, STEP), most})
