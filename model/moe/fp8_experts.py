"""Routed experts of an FP8 checkpoint as they are stored: FP8 weights, FP8 activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from core.errors import CheckpointError
from ep.dispatch.dispatcher import DispatchedAligned, DispatchedMasked, Payload
from kernels.build.aligned_rows import ALIGNMENT
from kernels.elementwise.quantise import quantise
from kernels.elementwise.silu_mul import silu_mul_quantise
from kernels.gemm.block_dequantise import BLOCK
from kernels.gemm.fp8_gemm import fp8_gemm
from kernels.moe.fp8_grouped_gemm import (
    fp8_grouped_gemm_contiguous,
    fp8_grouped_gemm_masked,
)
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import fused_moe
from kernels.moe.permute import permute
from model.config import ModelConfig
from model.weights.slot_loading import Parts, load_slots
from model.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Experts:
    """gate_up [S, 2 I, H], gate half first, and down [S, H, I] float8_e4m3fn; their scales
    [S, rows / 128, columns / 128] float32. What an empty slot holds is not used. After the
    placement's `num_slots` there may be one more, of the shared expert. The model computes in
    `dtype`.
    """

    num_slots: int
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    dtype: torch.dtype

    payload = Payload.FP8
    alignment = ALIGNMENT

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        prefix: str,
        experts: Sequence[int],
        *,
        fold_shared: bool = False,
    ) -> "Fp8Experts":
        """`experts` by slot, as `load_slots` has them. CheckpointError when not all are FP8."""

        def empty(num_slots: int, rows: int, columns: int) -> Parts:
            values = torch.zeros(num_slots, rows, columns, dtype=torch.uint8, device=weights.device)
            scales = torch.zeros(num_slots, rows // BLOCK, columns // BLOCK, device=values.device)
            return values.view(torch.float8_e4m3fn), scales

        (gate_up, gate_up_scale), (down, down_scale) = load_slots(
            partial(_stored, weights), empty, config, prefix, experts, fold_shared=fold_shared
        )
        return cls(
            num_slots=len(experts), gate_up=gate_up, gate_up_scale=gate_up_scale, down=down,
            down_scale=down_scale, dtype=weights.dtype,
        )  # fmt: skip

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a routed expert consists of: tensors [num_slots, ...], row s is slot s."""
        stacks = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        return tuple(stack[: self.num_slots] for stack in stacks)

    @property
    def folds_shared(self) -> bool:
        return len(self.down) > self.num_slots

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[N, H] grouped by slot -> [N, H]; `counts` are the rows of each slot."""
        slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        values, scales = quantise(rows)
        aligned = permute(
            values, slots.to(rows.device).unsqueeze(1), len(self.down),
            alignment=ALIGNMENT, scale=scales,
        )  # fmt: skip
        assert aligned.scales is not None
        stacks = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        where = aligned.expert_of, aligned.ends
        out = self._contiguous(aligned.rows, aligned.scales, where, stacks)
        return out.index_select(0, aligned.row_of[0]).to(rows.dtype)

    def forward_aligned(self, sent: DispatchedAligned) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        assert sent.scales is not None
        where = sent.slot_of, sent.ends
        out = self._contiguous(sent.hidden, sent.scales, where, self.slot_tensors)
        return out.to(self.dtype)

    def forward_masked(self, sent: DispatchedMasked) -> torch.Tensor:
        """[S, C, H] -> [S, C, H]."""
        assert sent.scales is not None
        up, up_scale, down, down_scale = self.slot_tensors
        counts, rows = sent.counts, sent.expected_rows or None
        both = fp8_grouped_gemm_masked(
            sent.hidden, sent.scales, up, up_scale, counts, expected_rows=rows
        )
        inner = silu_mul_quantise(both, counts, expected_rows=sent.expected_rows)
        out = fp8_grouped_gemm_masked(*inner, down, down_scale, counts, expected_rows=rows)
        return out.to(self.dtype)

    def forward_fused(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H], as `ExpertWeights.forward_fused`."""
        up, up_scale, down, down_scale = self.slot_tensors
        experts = FusedExperts(gate_up=up, down=down, gate_up_scale=up_scale, down_scale=down_scale)
        return fused_moe(x, topk_idx, topk_weights, experts)

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H] through the shared expert, where it is one of these."""
        assert self.folds_shared
        both = fp8_gemm(*quantise(x), self.gate_up[-1], self.gate_up_scale[-1])
        inner = silu_mul_quantise(both)
        return fp8_gemm(*inner, self.down[-1], self.down_scale[-1]).to(self.dtype)

    def _contiguous(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor],
        stacks: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Aligned rows [M, H] -> [M, H] bfloat16; `where` are the slot of each row [M] and the end
        of each slot's rows [S]."""
        up, up_scale, down, down_scale = stacks
        both = fp8_grouped_gemm_contiguous(values, scales, up, up_scale, *where)
        inner = silu_mul_quantise(both, owner=where[0])
        return fp8_grouped_gemm_contiguous(*inner, down, down_scale, *where)


def stay_fp8(weights: Weights, config: ModelConfig, prefix: str) -> bool:
    """Whether the experts of a layer are to be kept as they are; one stands for all."""
    fits = config.hidden_size % BLOCK == 0 and config.moe_intermediate_size % BLOCK == 0
    name = f"{prefix}.experts.0.gate_proj.weight"
    return fits and weights.keeps_fp8 and weights.checkpoint.is_fp8(name)


def _stored(weights: Weights, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint = weights.checkpoint
    if not checkpoint.is_fp8(name):
        raise CheckpointError(f"{checkpoint.folder}: {name} is not FP8, unlike others of its layer")
    values, scale = checkpoint.read_fp8(name)
    return values.to(weights.device), scale.to(weights.device)
