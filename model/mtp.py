"""A multi-token-prediction layer: from a position's hidden state and the token after it, the
token after that.

    mtp = DeepseekV3.load(folder, ..., config=replace(config, mtp="whole")).mtp
    hidden = mtp.decode(batch, states, kv_cache)     # one row a position; or `forward`
    drafts = mtp.logits(hidden[rows]).argmax(-1)

Position i of its KV is of the state at i and the token at i + 1. The last position of a page is
thus of a token outside the page: a page that is used again, for a prompt which goes on otherwise,
has that of whoever computed it. That may cost a draft, and nothing else.
"""

from dataclasses import dataclass

import torch

from ep.dispatch.expert_shard import ExpertShard
from kernels.elementwise.combine import combined
from kernels.elementwise.rms_norm import rms_norm
from model.attention.plan import AttentionPlan, DecodePlan
from model.batch import DecodeBatch, ForwardBatch
from model.config import ModelConfig
from model.layer import Layer
from model.projection import Projection
from model.weights.tensor_names import layer_prefix
from model.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """enorm, hnorm and final_norm [H]; eh_proj [H, 2 H]. `embedding`, `head` [vocab, H] and
    `rotation_table` are the main model's, whose copies in a checkpoint are not read. A layer of
    which only the KV is wanted has no MLP.

    states    [T, H] of the main model after its final norm at position i, or of the pass before
    kv_cache  [pages, page_tokens, kv_dim], this layer's own, zeros at first
    """

    config: ModelConfig
    embedding: torch.Tensor
    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: Projection
    layer: Layer
    final_norm: torch.Tensor
    head: Projection
    rotation_table: torch.Tensor

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        experts: ExpertShard,
        embedding: torch.Tensor,
        head: Projection,
        rotation_table: torch.Tensor,
    ) -> "MtpLayer":
        """MTP layer 0, as much of it as `config.mtp` says."""
        prefix, moe_layer = layer_prefix(config.num_layers), config.moe_layer(config.num_layers)
        is_whole = config.mtp == "whole"
        return cls(
            config=config,
            embedding=embedding,
            enorm=weights.get(f"{prefix}.enorm.weight"),
            hnorm=weights.get(f"{prefix}.hnorm.weight"),
            eh_proj=weights.projection(f"{prefix}.eh_proj.weight"),
            final_norm=weights.get(f"{prefix}.shared_head.norm.weight"),
            layer=Layer.load(weights, config, prefix, experts, moe_layer, has_mlp=is_whole),
            head=head,
            rotation_table=rotation_table,
        )

    def write(self, batch: ForwardBatch, states: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """The latents of `batch.following`, and nothing else."""
        assert batch.following is not None
        rotation = self.rotation_table.index_select(0, batch.positions)
        plan = AttentionPlan(rotation=rotation, slots=batch.slots)
        mixed = self._mixed(batch.following, states)
        self.layer.begin(None, mixed, plan, kv_cache, batch.slots[:0])

    def forward(
        self, batch: ForwardBatch, states: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], for `logits` and as `states` of a next pass. `batch.token_ids` are the tokens at
        position i + 1, all else as for the main model; a rank without tokens takes part."""
        plan = None
        if batch.token_ids.numel():
            plan = AttentionPlan.build(batch, self.config, self.rotation_table, kv_cache)
        mixed = self._mixed(batch.token_ids, states)
        update, mixed = self.layer.forward(None, mixed, plan, kv_cache, batch.tokens_per_rank)
        return rms_norm(mixed + combined(update), self.final_norm, self.config.rms_norm_eps)

    def decode(
        self, batch: DecodeBatch, states: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, of one position a row; can be captured as `DeepseekV3.decode` can."""
        plan = DecodePlan.build(batch, self.rotation_table, self.config.num_heads)
        mixed = self._mixed(batch.token_ids, states)
        update, mixed = self.layer.decode(None, mixed, plan, kv_cache)
        return rms_norm(mixed + combined(update), self.final_norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, vocab] float32, in `out` where there is one."""
        return self.head.forward_wide(hidden, out)

    def _mixed(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T, H], what goes into the layer."""
        eps = self.config.rms_norm_eps
        token = rms_norm(self.embedding.index_select(0, token_ids), self.enorm, eps)
        previous = rms_norm(states, self.hnorm, eps)
        return self.eh_proj.forward(torch.cat((token, previous), dim=-1))
