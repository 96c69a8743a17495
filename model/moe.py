"""Mixture of experts: gate, dispatch to the ranks that hold them, combine, shared experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep.dispatcher import Dispatcher
from kernels.gate import gate
from kernels.grouped_linear import grouped_linear
from kernels.linear import favoured_layout
from kernels.silu_mul import silu_mul
from model.config import ModelConfig
from model.mlp import Mlp
from model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Which routed experts are here, and how tokens get to the others.

    local_experts        logical ids in order of local slots
    logical_to_physical  [E] int64 on the model's device; None when they are the same
    """

    dispatcher: Dispatcher
    local_experts: tuple[int, ...]
    logical_to_physical: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """gate_weight [E, H] and gate_bias [E] float32; gate_up [local, 2 I, H], down [local, H, I]."""

    config: ModelConfig
    plan: ExpertPlan
    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp | None

    @classmethod
    def load(cls, weights: Weights, config: ModelConfig, prefix: str, plan: ExpertPlan) -> "Moe":
        gate_up, down = load_experts(weights, config, prefix, plan.local_experts)
        return cls(
            config=config,
            plan=plan,
            gate_weight=weights.get(f"{prefix}.gate.weight", torch.float32),
            gate_bias=weights.get(f"{prefix}.gate.e_score_correction_bias", torch.float32),
            gate_up=gate_up,
            down=down,
            shared=(
                Mlp.load(weights, f"{prefix}.shared_experts") if config.num_shared_experts else None
            ),
        )

    def forward(self, x: torch.Tensor, tokens_per_rank: tuple[int, ...]) -> torch.Tensor:
        """[T, H] -> [T, H]; also with T = 0, for the tokens of other ranks."""
        topk_idx, topk_weights = gate(
            x,
            self.gate_weight,
            self.gate_bias,
            num_groups=self.config.num_groups,
            groups_per_token=self.config.groups_per_token,
            experts_per_token=self.config.experts_per_token,
            norm_topk=self.config.norm_topk,
            scaling=self.config.routed_scaling,
        )
        if self.plan.logical_to_physical is not None:
            topk_idx = self.plan.logical_to_physical[topk_idx]
        dispatcher = self.plan.dispatcher
        sent = dispatcher.dispatch(x, topk_idx, topk_weights, tokens_per_rank)
        counts = sent.expert_counts.tolist()
        activated = silu_mul(grouped_linear(sent.hidden, counts, self.gate_up))
        routed = dispatcher.combine(grouped_linear(activated, counts, self.down), sent.handle)
        if self.shared is None or not len(x):
            return routed
        return routed + self.shared.forward(x)


def load_experts(
    weights: Weights, config: ModelConfig, prefix: str, experts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up, down) of the given experts, stacked."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    options = {"dtype": weights.dtype, "device": weights.device}
    gate_up = torch.empty(len(experts), 2 * width, hidden, **options)
    down = torch.empty(len(experts), hidden, width, **options)
    for slot, expert in enumerate(experts):
        stem = f"{prefix}.experts.{expert}"
        gate_up[slot, :width] = weights.get(f"{stem}.gate_proj.weight")
        gate_up[slot, width:] = weights.get(f"{stem}.up_proj.weight")
        down[slot] = weights.get(f"{stem}.down_proj.weight")
    return favoured_layout(gate_up), favoured_layout(down)
