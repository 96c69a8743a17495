"""A multi-token-prediction layer: from a position's hidden state and the token after it, the
token after that."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ep.dispatch.expert_shard import ExpertShard
from kernels.elementwise.combine import combined
from kernels.elementwise.rms_norm import rms_norm
from model.attention.plan import AttentionPlan
from model.attention.rotation import rotation_table
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.deepseek import checked_experts
from model.layer import Layer
from model.projection import Projection
from model.weights.checkpoint import Checkpoint
from model.weights.tensor_names import EMBEDDING, HEAD, layer_prefix
from model.weights.weights import LinearForm, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """enorm, hnorm and final_norm [H]; eh_proj [H, 2 H]; embedding and head [vocab, H]."""

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
        folder: str | Path,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        experts: ExpertShard | None = None,
        linear: LinearForm = "auto",
        depth: int = 0,
    ) -> "MtpLayer":
        """Reads MTP layer `depth` of a folder; arguments as for `DeepseekV3.load`, the placement
        is one of a single layer.

        CheckpointError when the folder has none, or not all of it.
        """
        config = ModelConfig.from_folder(folder)
        experts = checked_experts(experts, config, 1, device)
        table = rotation_table(config.rope, config.qk_rope_head_dim, config.max_position)
        prefix = layer_prefix(config.num_layers + depth)
        with Checkpoint(folder, device) as checkpoint:
            checkpoint.check(config)
            checkpoint.check_mtp(config, depth)
            weights = Weights(
                checkpoint=checkpoint, device=torch.device(device), dtype=dtype, linear=linear
            )
            own_embedding, own_head = (
                f"{prefix}.embed_tokens.weight",
                f"{prefix}.shared_head.head.weight",
            )
            main_head = EMBEDDING if config.tie_word_embeddings else HEAD
            return cls(
                config=config,
                embedding=weights.get(own_embedding if weights.has(own_embedding) else EMBEDDING),
                enorm=weights.get(f"{prefix}.enorm.weight"),
                hnorm=weights.get(f"{prefix}.hnorm.weight"),
                eh_proj=weights.projection(f"{prefix}.eh_proj.weight"),
                layer=Layer.load(weights, config, prefix, experts, 0),
                final_norm=weights.get(f"{prefix}.shared_head.norm.weight"),
                head=weights.projection(own_head if weights.has(own_head) else main_head),
                rotation_table=table.to(device),
            )

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [S, vocab] float32 of `batch.logit_rows`, hidden [T, H] for a next MTP layer).

        hidden           [T, H] of `DeepseekV3.hidden_states` at position i
        batch.token_ids  [T], the tokens at position i + 1; all else as for the main model
        kv_cache         [pages, page_tokens, kv_dim], this layer's own, zeros at first
        """
        eps = self.config.rms_norm_eps
        plan = None
        if batch.token_ids.numel():
            plan = AttentionPlan.build(batch, self.config, self.rotation_table, kv_cache)
        token = rms_norm(self.embedding[batch.token_ids], self.enorm, eps)
        previous = rms_norm(hidden, self.hnorm, eps)
        mixed = self.eh_proj.forward(torch.cat((token, previous), dim=-1))
        update, mixed = self.layer.forward(None, mixed, plan, kv_cache, batch.tokens_per_rank)
        out = rms_norm(mixed + combined(update), self.final_norm, eps)
        return self.head.forward_wide(out[batch.logit_rows]), out
