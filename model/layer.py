"""One decoder layer: attention and MLP, each behind a norm and beside the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.expert_shard import ExpertShard
from kernels.rms_norm import add_rms_norm
from model.attention import Attention
from model.attention_plan import AttentionPlan
from model.config import ModelConfig
from model.decode_plan import DecodePlan
from model.mlp import Mlp
from model.moe import Moe
from model.projection import Activations
from model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norm weights are [H]."""

    eps: float
    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: Mlp | Moe

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        prefix: str,
        experts: ExpertShard,
        moe_layer: int | None,
    ) -> "Layer":
        """`moe_layer` counts MoE layers only; None for a dense layer."""
        mlp_prefix = f"{prefix}.mlp"
        return cls(
            eps=config.rms_norm_eps,
            input_norm=weights.get(f"{prefix}.input_layernorm.weight"),
            attention=Attention.load(weights, config, f"{prefix}.self_attn"),
            post_attention_norm=weights.get(f"{prefix}.post_attention_layernorm.weight"),
            mlp=(
                Mlp.load(weights, mlp_prefix)
                if moe_layer is None
                else Moe.load(weights, config, mlp_prefix, experts, moe_layer)
            ),
        )

    def forward(
        self,
        update: torch.Tensor | None,
        hidden: torch.Tensor,
        plan: AttentionPlan | None,
        cache: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        *,
        written: Callable[[], None] | None = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream is `hidden` [T, H] plus what the layer before adds to it, `update`
        (None in front of the first): a norm adds up on its way. Returns the next two, [S, H] when
        only `rows` [S] int64 are wanted behind attention.

        `plan` is None when T is 0. `written` is called as soon as the latents are in `cache`
        [pages, page_tokens, kv_dim] (on a GPU: as soon as the writes are enqueued).
        """
        query = None
        if plan is not None:
            query, hidden = self.begin(update, hidden, plan, cache)
        if written is not None:
            written()
        if rows is not None and not len(rows):
            return hidden[:0], hidden[:0]
        if query is None or plan is None:
            return self.take_part(hidden, tokens_per_rank), hidden
        attended = self.attention.out.forward(self.attention.attend(query, plan, cache))
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
            tokens_per_rank = (len(rows),)
        return self.behind_attention(attended, hidden, tokens_per_rank)

    def begin(
        self,
        update: torch.Tensor | None,
        hidden: torch.Tensor,
        plan: AttentionPlan,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The query for `attention.attend`, whose latents go into the cache, and the residual
        stream [T, H]; arguments as for `forward`."""
        normed, hidden = self.add_normed(update, hidden)
        return self.attention.write(normed, plan, cache), hidden

    def add_normed(
        self, update: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """What attention projects first, and the residual stream."""
        projection = self.attention.q_kv_a
        if update is None:
            return projection.normed(hidden, self.input_norm, self.eps), hidden
        return projection.add_normed(update, hidden, self.input_norm, self.eps)

    def behind_attention(
        self,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        is_row: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward` returns it, from what attention adds to `hidden`; `is_row` as for
        `Moe.forward`."""
        weight, eps = self.post_attention_norm, self.eps
        if isinstance(self.mlp, Moe):
            x, hidden = add_rms_norm(attended, hidden, weight, eps)
            return self.mlp.forward(x, tokens_per_rank, is_row), hidden
        normed, hidden = self.mlp.gate_up.add_normed(attended, hidden, weight, eps)
        return self.mlp.forward(normed), hidden

    def decode(
        self,
        update: torch.Tensor | None,
        hidden: torch.Tensor,
        plan: DecodePlan,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, for [B, H] of one new token a row."""
        normed, hidden = self.add_normed(update, hidden)
        attended = self.attention.decode(normed, plan, cache)
        weight, eps = self.post_attention_norm, self.eps
        if isinstance(self.mlp, Moe):
            x, hidden = add_rms_norm(attended, hidden, weight, eps)
            return self.mlp.decode(x, plan.is_row), hidden
        normed, hidden = self.mlp.gate_up.add_normed(attended, hidden, weight, eps)
        return self.mlp.forward(normed), hidden

    def take_part(self, nothing: torch.Tensor, tokens_per_rank: tuple[int, ...]) -> torch.Tensor:
        """A pass with no tokens of our own ([0, H]): our experts still serve other ranks."""
        if isinstance(self.mlp, Moe):
            return self.mlp.forward(nothing, tokens_per_rank)
        return nothing
