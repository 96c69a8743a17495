"""DeepSeek-V3: the whole model of one rank, over a paged KV cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ep.dispatch.expert_shard import ExpertShard
from kernels.elementwise.combine import Update, combined
from kernels.elementwise.rms_norm import rms_norm
from kernels.gemm.linear import favoured_layout
from model.attention.plan import AttentionPlan, DecodePlan
from model.attention.rotation import rotation_table
from model.batch import AttentionForm, DecodeBatch, ForwardBatch
from model.config import ModelConfig
from model.layer import Layer
from model.moe.moe import Moe
from model.mtp import MtpLayer
from model.projection import Projection
from model.weights.checkpoint import Checkpoint
from model.weights.load_order import loaded_tensors
from model.weights.tensor_names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from model.weights.weights import LinearForm, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3:
    """embedding and head [vocab, H], final_norm [H], rotation_table [positions, R / 2]."""

    config: ModelConfig
    experts: ExpertShard
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Projection
    rotation_table: torch.Tensor
    mtp: MtpLayer | None = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        config: ModelConfig | None = None,
        experts: ExpertShard | None = None,
        linear: LinearForm = "auto",
        form: AttentionForm = AttentionForm.PLAIN,
        source: Checkpoint | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> "DeepseekV3":
        """Reads a folder. `config` is its own, and says what is made of its MTP layer (None:
        nothing). Of the routed experts only those are read that `experts` places here (None: all
        of them), on the device of its maps. `linear` and `form` are as `Weights` has them; a model
        computes in the other form, too. The tensors come from `source`, if there is one, which is
        closed after it; `on_layer` is called with l once layer l is loaded.

        CheckpointError for a folder that does not fit, before any weight is read; ValueError for
        experts of a model of another shape.
        """
        config = config or ModelConfig.from_folder(folder)
        experts = checked_experts(experts, config, config.num_moe_layers, device)
        table = rotation_table(config.rope, config.qk_rope_head_dim, config.max_position)
        with source or Checkpoint(folder, device) as checkpoint:
            checkpoint.check(config)
            slots = [experts.local_experts(layer) for layer in range(config.num_moe_layers)]
            checkpoint.read_ahead([*loaded_tensors(checkpoint.stored, config, slots)])
            weights = Weights(
                checkpoint=checkpoint,
                device=torch.device(device),
                dtype=dtype,
                linear=linear,
                form=form,
            )
            embedding = weights.get(EMBEDDING)
            layers = []
            for layer in range(config.num_layers):
                prefix, moe_layer = layer_prefix(layer), config.moe_layer(layer)
                layers.append(Layer.load(weights, config, prefix, experts, moe_layer))
                if on_layer is not None:
                    on_layer(layer)
            model = cls(
                config=config,
                experts=experts,
                embedding=embedding,
                layers=tuple(layers),
                final_norm=weights.get(FINAL_NORM),
                head=Projection(weight=favoured_layout(embedding), dtype=dtype)
                if config.tie_word_embeddings
                else weights.projection(HEAD),
                rotation_table=table.to(device),
            )
            return model if config.mtp == "none" else replace(model, mtp=model.load_mtp(weights))

    def load_mtp(self, weights: Weights) -> MtpLayer:
        shared = self.embedding, self.head, self.rotation_table
        return MtpLayer.load(weights, self.config, self.experts, *shared)

    @property
    def num_kv_layers(self) -> int:
        return len(self.layers) + (self.mtp is not None)

    @property
    def moe_layers(self) -> tuple[Moe, ...]:
        """In order, as placements count them."""
        layers = self.layers if self.mtp is None else (*self.layers, self.mtp.layer)
        return tuple(layer.mlp for layer in layers if isinstance(layer.mlp, Moe))

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Logits [S, vocab] float32 of `batch.logit_rows`.

        kv_cache  [layers, pages, page_tokens, kv_dim], an MTP layer's last; zeros at first (unused
                  slots are multiplied by zero, so they have to be finite)
        on_layer  called with l once layer l's latents of this batch are in the cache; on a GPU
                  once the writes are enqueued on the current stream
        """
        return self.logits(self.hidden_rows(batch, kv_cache, on_layer))

    def hidden_rows(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """[S, H] of `batch.logit_rows` before the final norm, for `logits`."""
        if self.mtp is not None and batch.following is not None:
            hidden = self.run_layers(batch, kv_cache, on_layer, None)
            self.write_mtp(batch, hidden, kv_cache, on_layer)
            return hidden[batch.logit_rows]
        # After the last layer's attention the other rows are not needed.
        rows = None if batch.wanted_per_rank is None else batch.logit_rows
        hidden = self.run_layers(batch, kv_cache, on_layer, rows)
        return hidden if rows is not None else hidden[batch.logit_rows]

    def write_mtp(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        kv_cache: torch.Tensor,
        on_layer: Callable[[int], None] | None,
    ) -> None:
        """The MTP layer's KV, from [T, H] before the final norm; no rank waits for another."""
        assert self.mtp is not None
        if len(hidden):
            states = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
            self.mtp.write(batch, states, kv_cache[-1])
        if on_layer is not None:
            on_layer(len(self.layers))

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """[T, H] of all tokens after the final norm: what an MTP layer starts from."""
        hidden = self.run_layers(batch, kv_cache, on_layer, None)
        return rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, vocab] float32 from [S, H] before the final norm."""
        normed = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return self.head.forward_wide(normed)

    def decode(
        self,
        batch: DecodeBatch,
        kv_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, vocab] float32 of one new token a row, in `out` where there is one; those of
        padding mean nothing. `states` [B, H] become what an MTP layer starts from.

        Nothing waits for the device and all sizes are those of `batch`, so that a CUDA graph can
        be captured of it. `kv_cache` as for `forward`; padding leaves it alone.
        """
        plan = DecodePlan.build(batch, self.rotation_table, self.config.num_heads)
        hidden = self.embedding.index_select(0, batch.token_ids)
        update: Update | None = None
        for layer, cache in zip(self.layers, self.caches(kv_cache), strict=True):
            update, hidden = layer.decode(update, hidden, plan, cache)
        assert update is not None
        weight, eps = self.final_norm, self.config.rms_norm_eps
        normed, hidden = self.head.add_normed(update, hidden, weight, eps)
        if states is not None:
            is_plain = isinstance(normed, torch.Tensor)
            states.copy_(normed if is_plain else rms_norm(hidden, weight, eps))
        return self.head.forward_wide(normed, out)

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of the main model's layers, [pages, page_tokens, kv_dim] each."""
        assert len(kv_cache) == self.num_kv_layers, "a cache of another number of layers"
        return kv_cache[: len(self.layers)].unbind(0)

    def run_layers(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        on_layer: Callable[[int], None] | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The residual stream after the last layer: [T, H], or [S, H] of `rows`."""
        plan = None
        if batch.token_ids.numel():
            plan = AttentionPlan.build(batch, self.config, self.rotation_table, kv_cache)
        update: Update | None = None
        hidden = self.embedding[batch.token_ids]
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(
            zip(self.layers, self.caches(kv_cache), strict=True)
        ):
            wanted = rows if index == last else None
            per_rank = batch.tokens_per_rank if wanted is None else batch.wanted_per_rank
            assert per_rank is not None
            update, hidden = layer.forward(
                update,
                hidden,
                plan,
                cache,
                per_rank,
                written=None if on_layer is None else partial(on_layer, index),
                rows=wanted,
            )
        return hidden if update is None else hidden + combined(update)


def checked_experts(
    experts: ExpertShard | None, config: ModelConfig, num_layers: int, device: str | torch.device
) -> ExpertShard:
    """All experts on this rank where nothing is said; ValueError for those of another model."""
    if experts is None:
        return ExpertShard.alone(num_layers, config.num_experts, device)
    placement = experts.placement
    if (placement.num_layers, placement.num_logical) != (num_layers, config.num_experts):
        raise ValueError(
            f"experts are placed for {placement.num_layers} MoE layers of {placement.num_logical}, "
            f"the model has {num_layers} of {config.num_experts}"
        )
    return experts
