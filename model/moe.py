"""Mixture of experts: gate, dispatch to the ranks that hold them, combine, shared experts."""

from dataclasses import dataclass

import torch

from ep.dispatcher import Dispatcher
from ep.expert_shard import ExpertShard
from ep.placement_maps import LayerMaps
from kernels.count_experts import count_experts
from kernels.gate import gate
from model.config import ModelConfig
from model.experts import ExpertWeights, load_experts
from model.int4_experts import Int4Experts
from model.mlp import Mlp
from model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """gate_weight [E, H] and gate_bias [E] float32; counts [E] int64, of how many (token, choice)
    pairs of this rank each logical expert has been. `shared` is None where there is none, and
    where it is one of `experts`."""

    config: ModelConfig
    rank: int
    dispatcher: Dispatcher
    maps: LayerMaps
    counts: torch.Tensor
    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    experts: ExpertWeights | Int4Experts
    shared: Mlp | None

    @classmethod
    def load(
        cls, weights: Weights, config: ModelConfig, prefix: str, shard: ExpertShard, layer: int
    ) -> "Moe":
        """`layer` counts MoE layers only."""
        return cls(
            config=config,
            rank=shard.rank,
            dispatcher=shard.dispatcher,
            maps=shard.maps.layer(layer),
            counts=shard.counts[layer],
            gate_weight=weights.get(f"{prefix}.gate.weight", torch.float32),
            gate_bias=weights.get(f"{prefix}.gate.e_score_correction_bias", torch.float32),
            experts=load_experts(
                weights,
                config,
                prefix,
                shard.local_experts(layer),
                fold_shared=shard.fold_shared,
            ),
            shared=(
                Mlp.load(weights, f"{prefix}.shared_experts")
                if config.num_shared_experts and not shard.fold_shared
                else None
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
        count_experts(topk_idx, self.counts)
        physical = self.maps.choose(topk_idx, self.rank)
        beside: list[torch.Tensor] = []  # what the shared expert makes of x

        def compute_shared() -> None:
            if self.shared is not None and len(x):
                beside.append(self.shared.forward(x))

        sent = self.dispatcher.dispatch(
            x, physical, topk_weights, tokens_per_rank, meanwhile=compute_shared
        )
        rows, counts = sent.hidden, sent.expert_counts.tolist()
        if self.experts.folds_shared:
            computed = self.experts.forward(torch.cat((rows, x)), [*counts, len(x)])
            beside.append(computed[len(rows) :])
            computed = computed[: len(rows)]
        else:
            computed = self.experts.forward(rows, counts)
        routed = self.dispatcher.combine(computed, sent.handle)
        return routed + beside[0] if beside else routed
