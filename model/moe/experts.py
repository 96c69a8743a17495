"""Weights of the routed experts that a rank holds in one layer, slot by slot: in the type that
the model computes with, as FP8 or as int4."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep.dispatch.dispatcher import DispatchedAligned, DispatchedMasked, Payload
from kernels.build.aligned_rows import ALIGNMENT
from kernels.elementwise.silu_mul import silu_mul
from kernels.gemm.grouped_linear import (
    grouped_linear,
    grouped_linear_aligned,
    grouped_linear_masked,
)
from kernels.gemm.linear import favoured_layout, linear
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import fused_moe
from model.config import ModelConfig
from model.moe.fp8_experts import Fp8Experts, stay_fp8
from model.moe.int4_experts import Int4Experts, are_int4
from model.weights.slot_loading import Parts, load_slots
from model.weights.weights import Weights


def load_experts(
    weights: Weights,
    config: ModelConfig,
    prefix: str,
    experts: Sequence[int],
    *,
    fold_shared: bool = False,
) -> "Experts":
    """`experts` by slot, as the checkpoint has them and `weights.linear` wants them.
    CheckpointError when those of one layer are stored in different ways; ValueError for a shared
    expert that cannot be folded in."""
    if are_int4(weights, prefix):
        if fold_shared:
            raise ValueError("the shared expert cannot be folded in: the routed ones are int4")
        return Int4Experts.load(weights, config, prefix, experts)
    kind = Fp8Experts if stay_fp8(weights, config, prefix) else ExpertWeights
    return kind.load(weights, config, prefix, experts, fold_shared=fold_shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """gate_up [S, 2 I, H] and down [S, H, I] of S slots; what an empty slot holds is not used.
    After the placement's `num_slots` there may be one more, of the shared expert."""

    num_slots: int
    gate_up: torch.Tensor
    down: torch.Tensor

    payload = Payload.PLAIN
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
    ) -> "ExpertWeights":
        """`experts` by slot, as `load_slots` has them."""

        def empty(*shape: int) -> Parts:
            return (torch.zeros(shape, dtype=weights.dtype, device=weights.device),)

        (gate_up,), (down,) = load_slots(
            lambda name: (weights.get(name),), empty, config, prefix, experts,
            fold_shared=fold_shared,
        )  # fmt: skip
        return cls(
            num_slots=len(experts), gate_up=favoured_layout(gate_up), down=favoured_layout(down)
        )

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a routed expert consists of: tensors [num_slots, ...], row s is slot s."""
        return self.gate_up[: self.num_slots], self.down[: self.num_slots]

    @property
    def folds_shared(self) -> bool:
        return len(self.down) > self.num_slots

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[N, H] grouped by slot -> [N, H]; `counts` are the rows of each slot."""
        activated = silu_mul(grouped_linear(rows, counts, self.gate_up))
        return grouped_linear(activated, counts, self.down)

    def forward_aligned(self, sent: DispatchedAligned) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        up, down = self.slot_tensors
        both = grouped_linear_aligned(sent.hidden, sent.slot_of, up)
        return grouped_linear_aligned(silu_mul(both), sent.slot_of, down)

    def forward_masked(self, sent: DispatchedMasked) -> torch.Tensor:
        """[S, C, H] -> [S, C, H]."""
        up, down = self.slot_tensors
        rows = sent.expected_rows
        both = grouped_linear_masked(sent.hidden, sent.counts, up, expected_rows=rows)
        inner = silu_mul(both, sent.counts, expected_rows=rows)
        return grouped_linear_masked(inner, sent.counts, down, expected_rows=rows)

    def forward_fused(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H], all of it for the slots topk_idx [T, K] (-1: none) with their weights
        [T, K]; the sum of the choices."""
        up, down = self.slot_tensors
        return fused_moe(x, topk_idx, topk_weights, FusedExperts(gate_up=up, down=down))

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H] through the shared expert, where it is one of these."""
        assert self.folds_shared
        return linear(silu_mul(linear(x, self.gate_up[-1])), self.down[-1])


Experts = ExpertWeights | Fp8Experts | Int4Experts
