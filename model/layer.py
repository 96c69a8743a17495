"""One decoder layer: attention and MLP, each after a norm and beside the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.dispatch.expert_shard import ExpertShard
from kernels.elementwise.combine import Update
from model.attention.attention import Attention
from model.attention.plan import AttentionPlan, DecodePlan
from model.config import ModelConfig
from model.mlp import Mlp
from model.moe.moe import Moe
from model.projection import Activations
from model.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norm weights are [H]; without an MLP the layer only writes latents."""

    eps: float
    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: Mlp | Moe | None

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        prefix: str,
        experts: ExpertShard,
        moe_layer: int | None,
        *,
        has_mlp: bool = True,
    ) -> "Layer":
        """`moe_layer` counts MoE layers only; None for a dense layer."""
        mlp_prefix = f"{prefix}.mlp"
        mlp: Mlp | Moe | None = None
        if has_mlp:
            mlp = (
                Mlp.load(weights, mlp_prefix)
                if moe_layer is None
                else Moe.load(weights, config, mlp_prefix, experts, moe_layer)
            )
        return cls(
            eps=config.rms_norm_eps,
            input_norm=weights.get(f"{prefix}.input_layernorm.weight"),
            attention=Attention.load(weights, config, f"{prefix}.self_attn"),
            post_attention_norm=weights.get(f"{prefix}.post_attention_layernorm.weight"),
            mlp=mlp,
        )

    def forward(
        self,
        update: Update | None,
        hidden: torch.Tensor,
        plan: AttentionPlan | None,
        cache: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        *,
        written: Callable[[], None] | None = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[Update, torch.Tensor]:
        """The residual stream is `hidden` [T, H] plus what the layer before adds to it, `update`
        (None before the first), which may be in parts: a norm adds up on its way. Returns the
        next two, [S, H] when only `rows` [S] int64 are wanted after attention.

        `tokens_per_rank` go on there: T of every rank, or S. `plan` is None when T is 0. `written`
        is called as soon as the latents are in `cache` [pages, page_tokens, kv_dim] (on a GPU: as
        soon as the writes are enqueued).
        """
        query = None
        if plan is not None:
            are_alone = rows is not None and (plan.wanted is not None or not len(rows))
            query, hidden = self.begin(update, hidden, plan, cache, rows if are_alone else None)
        if written is not None:
            written()
        if query is None or plan is None or (rows is not None and not len(rows)):
            return self.take_part(hidden[:0], tokens_per_rank), hidden[:0]
        attended: Activations
        if rows is None:
            attended = self.attention.attend_all(query, plan, cache)
        else:
            attended, hidden = self.attend_wanted(query, plan, cache, rows), hidden[rows]
        return self.after_attention(self.attention.out.forward(attended), hidden, tokens_per_rank)

    def begin(
        self,
        update: Update | None,
        hidden: torch.Tensor,
        plan: AttentionPlan,
        cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The query for `attention.attend`, or that of `rows` [S] only, whose latents go into the
        cache, and the residual stream [T, H]; arguments as for `forward`."""
        normed, hidden = self.add_normed(update, hidden)
        return self.attention.write(normed, plan, cache, rows), hidden

    def attend_wanted(
        self, query: torch.Tensor, plan: AttentionPlan, cache: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """[S, heads * V] of the batch's logit rows `rows` [S]; `query` of these only where the plan
        has them `wanted`."""
        if plan.wanted is None:
            return self.attention.attend(query, plan, cache)[rows]
        return self.attention.attend_absorbed(query, plan.wanted, cache).flatten(1)

    def add_normed(
        self, update: Update | None, hidden: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """What attention projects first, and the residual stream."""
        projection = self.attention.q_kv_a
        if update is None:
            return projection.normed(hidden, self.input_norm, self.eps), hidden
        return projection.add_normed(update, hidden, self.input_norm, self.eps)

    def after_attention(
        self,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        is_row: torch.Tensor | None = None,
    ) -> tuple[Update, torch.Tensor]:
        """As `forward` returns it, from what attention adds to `hidden`; `is_row` as for
        `Moe.forward`."""
        weight, eps = self.post_attention_norm, self.eps
        if isinstance(self.mlp, Moe):
            x, rows, hidden = self.mlp.add_normed(attended, hidden, weight, eps, decodes=False)
            return self.mlp.forward_parts(x, tokens_per_rank, is_row, rows), hidden
        assert self.mlp is not None
        normed, hidden = self.mlp.gate_up.add_normed(attended, hidden, weight, eps)
        return self.mlp.forward(normed), hidden

    def decode(
        self,
        update: Update | None,
        hidden: torch.Tensor,
        plan: DecodePlan,
        cache: torch.Tensor,
    ) -> tuple[Update, torch.Tensor]:
        """As `forward`, for [B, H] of one new token a row; what it adds may be in parts."""
        normed, hidden = self.add_normed(update, hidden)
        attended = self.attention.decode(normed, plan, cache)
        weight, eps = self.post_attention_norm, self.eps
        if isinstance(self.mlp, Moe):
            x, rows, hidden = self.mlp.add_normed(attended, hidden, weight, eps, decodes=True)
            return self.mlp.decode_parts(x, plan.is_row, rows), hidden
        assert self.mlp is not None
        normed, hidden = self.mlp.gate_up.add_normed(attended, hidden, weight, eps)
        return self.mlp.forward(normed), hidden

    def take_part(self, nothing: torch.Tensor, tokens_per_rank: tuple[int, ...]) -> torch.Tensor:
        """A pass with no tokens of our own ([0, H]): our experts still serve other ranks."""
        if isinstance(self.mlp, Moe) and any(tokens_per_rank):
            return self.mlp.forward(nothing, tokens_per_rank)
        return nothing
