"""Multi-head latent attention of one layer, in both forms, with one projection for q_a and kv_a."""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.absorb import absorb_values
from kernels.attention.absorb_query import absorb_query
from kernels.attention.mla_decode import mla_decode, mla_decode_paged, mla_decode_splits
from kernels.attention.mla_prefill import mla_prefill, mla_prefill_grouped, mla_prefill_quantised
from kernels.attention.paged_rows import RowGroup
from kernels.attention.rope_write import rope_write
from kernels.gemm.head_linear import head_linear
from model.attention.plan import AttentionPlan, DecodePlan, PagedRows
from model.config import ModelConfig
from model.projection import Activations, Projection
from model.weights.weights import Weights

# NOTE: the two inner norms do not follow `rms_norm_eps`: DeepSeek's code leaves their default.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Weights of one layer; D = qk_nope_head_dim, R = qk_rope_head_dim, C = kv_lora_rank.

    q_kv_a     [q_lora_rank + C + R, H]; without q_lora_rank [heads * (D + R) + C + R, H]
    q_a_norm   [q_lora_rank] or None, q_b [heads * (D + R), q_lora_rank] or None
    kv_a_norm  [C]
    kv_b       [heads, D + V, C]
    stored_kv_b  [heads * (D + V), C] in FP8, by which the plain form expands latents, or None
    out        [H, heads * V]
    """

    config: ModelConfig
    q_kv_a: Projection
    q_a_norm: torch.Tensor | None
    q_b: Projection | None
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    stored_kv_b: Projection | None
    out: Projection

    @classmethod
    def load(cls, weights: Weights, config: ModelConfig, prefix: str) -> "Attention":
        lora = config.q_lora_rank is not None
        q_a = "q_a_proj" if lora else "q_proj"
        bias = load_bias(weights, config, prefix) if config.attention_bias else None
        # Rows that change places could leave their block of FP8 scales.
        plain = not config.rope_interleave
        names = (f"{prefix}.{q_a}.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
        q_kv_a = weights.projection(*names, bias=bias, plain=plain)
        q_b = weights.projection(f"{prefix}.q_b_proj.weight", plain=plain) if lora else None
        kv_b = f"{prefix}.kv_b_proj.weight"
        if not config.rope_interleave:
            interleave_keys(q_kv_a.weight, config)
            interleave_queries((q_b or q_kv_a).weight, config)
            if bias is not None:
                interleave_keys(bias, config)  # a query's bias is before its norm, or zero
        return cls(
            config=config,
            q_kv_a=q_kv_a,
            q_a_norm=weights.get(f"{prefix}.q_a_layernorm.weight") if lora else None,
            q_b=q_b,
            kv_a_norm=weights.get(f"{prefix}.kv_a_layernorm.weight"),
            kv_b=weights.get(kv_b).view(config.num_heads, -1, config.kv_lora_rank),
            stored_kv_b=weights.projection(kv_b) if weights.expands_fp8(kv_b) else None,
            out=weights.projection(
                f"{prefix}.o_proj.weight",
                bias=weights.get(f"{prefix}.o_proj.bias") if config.attention_bias else None,
            ),
        )

    def write(
        self,
        x: Activations,
        plan: AttentionPlan,
        cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Puts the latents of x [T, H] into the layer's cache [pages, page_tokens, C + R];
        returns the query [T, heads, D + R], rotated, or that of `rows` [S] int64 only."""
        query, latent, key_rope = self.split(self.q_kv_a.forward(x))
        norm = {"latent_norm": self.kv_a_norm, "eps": LATENT_NORM_EPS}
        rotation, slots = plan.rotation, plan.slots
        if rows is not None:
            no_query = query.new_empty(len(query), 0, self.config.qk_head_dim)
            rope_write(no_query, latent, key_rope, rotation, slots, cache, **norm)
            if not len(rows):
                return no_query[:0]
            # Theirs are written once more, the same.
            query, latent, key_rope, rotation, slots = (
                each.index_select(0, rows) for each in (query, latent, key_rope, rotation, slots)
            )
        query = self.project_query(query)
        rope_write(query, latent, key_rope, rotation, slots, cache, **norm)
        return query

    def project(self, x: Activations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query [T, heads, D + R], latent [T, C] before its norm, key [T, R]; the last two
        are slices, nothing is rotated."""
        query, latent, key_rope = self.split(self.q_kv_a.forward(x))
        return self.project_query(query), latent, key_rope

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slices of what `q_kv_a` gives: for `project_query`, latent [T, C] before its norm,
        key [T, R]."""
        rank, rotated = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        width = projected.shape[1] - rank - rotated
        query, latent, key_rope = projected.split((width, rank, rotated), dim=-1)
        return query, latent, key_rope

    def project_query(self, query: torch.Tensor) -> torch.Tensor:
        """[T, heads, D + R]."""
        if self.q_b is not None:
            assert self.q_a_norm is not None
            query = self.q_b.forward(self.q_b.normed(query, self.q_a_norm, LATENT_NORM_EPS))
        return query.contiguous().view(-1, self.config.num_heads, self.config.qk_head_dim)

    def decode(self, x: Activations, plan: DecodePlan, cache: torch.Tensor) -> torch.Tensor:
        """[B, H] -> [B, H], one new token a row, in absorbed form; zeros in place of attention
        for padding."""
        config, nope_dim = self.config, self.config.qk_nope_head_dim
        is_ours = plan.schedule is None  # attention, not FlashMLA's
        given = *self.project(x), plan.rotation, plan.slots, cache, self.kv_b
        norm = {"latent_norm": self.kv_a_norm, "eps": LATENT_NORM_EPS}
        absorbed = absorb_query(*given, **norm, leads=is_ours)
        rows = absorbed, cache, plan.block_table, plan.kv_lengths
        options: dict[str, Any] = {"scale": config.softmax_scale, "schedule": plan.schedule}
        if self.out.is_fp8:
            latents = mla_decode_splits(*rows, value_dim=config.kv_lora_rank, **options)
            return self.out.forward(absorb_values(latents, self.kv_b, nope_dim, follows=is_ours))
        latents = mla_decode_paged(*rows, value_dim=config.kv_lora_rank, **options)
        values = latents.new_empty(*latents.shape[:2], config.v_head_dim)
        head_linear(latents, self.kv_b[:, nope_dim:], out=values)
        return self.out.forward(values.flatten(1))

    def attend(
        self,
        query: torch.Tensor,
        plan: AttentionPlan,
        cache: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, heads * V], what `out` projects, from the query that `write` gave, in the forms that
        the plan was built for; into `out` where there is one."""
        kv_b, kv_b_scale = self.expanding_kv_b
        options: dict[str, Any] = {"scale": self.config.softmax_scale, "kv_b_scale": kv_b_scale}
        values = None if out is None else out.view(len(query), self.config.num_heads, -1)
        if plan.groups:
            found = self.attend_absorbed(query, plan.groups, cache)
        elif plan.rows:
            found = mla_prefill(query, cache, kv_b, plan.rows, **options)
        elif plan.paged and plan.paged[0].tokens is None:
            found = self.attend_absorbed(query, plan.paged[0], cache)
        else:
            if values is None:
                values = query.new_empty(*query.shape[:2], self.config.v_head_dim)
            if plan.key_groups:
                groups = plan.key_groups
                mla_prefill_grouped(query, cache, kv_b, groups, out=values, **options)
            for rows in plan.paged:
                assert rows.queries is not None
                assert rows.kept is not None
                assert rows.tokens is not None
                attended = self.attend_absorbed(query[rows.queries], rows, cache)
                values.index_copy_(0, rows.tokens, attended[rows.kept])
            return values.flatten(1)
        return (found if values is None else values.copy_(found)).flatten(1)

    def attend_all(
        self, query: torch.Tensor, plan: AttentionPlan, cache: torch.Tensor
    ) -> Activations:
        """As `attend`, quantised where that comes with it."""
        if not (self.out.is_fp8 and plan.key_groups) or plan.paged:
            return self.attend(query, plan, cache)
        kv_b, kv_b_scale = self.expanding_kv_b
        return mla_prefill_quantised(
            query,
            cache,
            kv_b,
            plan.key_groups,
            scale=self.config.softmax_scale,
            kv_b_scale=kv_b_scale,
        )

    @property
    def expanding_kv_b(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """kv_b [heads, D + V, C] and its scales as the plain form takes them."""
        if self.stored_kv_b is None:
            return self.kv_b, None
        return self.stored_kv_b.weight.view(self.kv_b.shape), self.stored_kv_b.scale

    def attend_absorbed(
        self, query: torch.Tensor, rows: PagedRows | tuple[RowGroup, ...], cache: torch.Tensor
    ) -> torch.Tensor:
        """[queries, heads, V]: kv_b's key half goes into the query [queries, heads, D + R], its
        value half into the result."""
        config, nope_dim = self.config, self.config.qk_nope_head_dim
        nope, rotated = query.split((nope_dim, config.qk_rope_head_dim), dim=-1)
        folded = head_linear(nope, self.kv_b[:, :nope_dim].transpose(1, 2))
        absorbed = torch.cat((folded, rotated), dim=-1)
        sizes: dict[str, Any] = {"value_dim": config.kv_lora_rank, "scale": config.softmax_scale}
        if isinstance(rows, PagedRows):
            table, lengths, schedule = rows.block_table, rows.kv_lengths, rows.schedule
            latents = mla_decode_paged(absorbed, cache, table, lengths, **sizes, schedule=schedule)
        else:
            latents = mla_decode(absorbed, cache, rows, **sizes)
        return head_linear(latents, self.kv_b[:, nope_dim:])


def load_bias(weights: Weights, config: ModelConfig, prefix: str) -> torch.Tensor:
    """[rows of q_kv_a]; a direct q_proj has no bias."""
    kv_a = weights.get(f"{prefix}.kv_a_proj_with_mqa.bias")
    if config.q_lora_rank is not None:
        return torch.cat((weights.get(f"{prefix}.q_a_proj.bias"), kv_a))
    return torch.cat((kv_a.new_zeros(config.num_heads * config.qk_head_dim), kv_a))


def interleaved_order(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """[R] int64: element i, then i + R / 2, for each i.

    Checkpoints without `rope_interleave` rotate these two as a pair; the kernels want pairs side
    by side. A product of a query and a key does not depend on the order of their elements, so
    only the weights have to change.
    """
    return torch.arange(config.qk_rope_head_dim, device=device).view(2, -1).t().flatten()


def interleave_keys(q_kv_a: torch.Tensor, config: ModelConfig) -> None:
    """Reorders, in place, the last R rows."""
    rotated = q_kv_a[-config.qk_rope_head_dim :]
    rotated.copy_(rotated[interleaved_order(config, q_kv_a.device)])


def interleave_queries(query: torch.Tensor, config: ModelConfig) -> None:
    """Reorders, in place, the last R of each head's D + R rows; rows after the heads stay."""
    heads = query[: config.num_heads * config.qk_head_dim].unflatten(0, (config.num_heads, -1))
    rotated = heads[:, config.qk_nope_head_dim :]
    rotated.copy_(rotated[:, interleaved_order(config, query.device)])
