"""What the attention of all layers shares in one forward pass; decided on the host."""

from dataclasses import dataclass

import torch

from kernels.mla_prefill_plan import KeyGroup, max_keys, plan_groups
from kernels.paged_rows import Row, RowGroup, group_rows, split_rows
from kernels.paths import path_of
from model.batch import AttentionForm, ForwardBatch
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """In plain form `rows`, or `key_groups` where there is a kernel for them; in absorbed form
    `groups`.

    rotation  [T, R / 2] complex64, of each token's position
    slots     [T] int64
    """

    rotation: torch.Tensor
    slots: torch.Tensor
    rows: tuple[Row, ...] = ()
    key_groups: tuple[KeyGroup, ...] = ()
    groups: tuple[RowGroup, ...] = ()

    @classmethod
    def build(
        cls,
        batch: ForwardBatch,
        config: ModelConfig,
        rotation_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> "AttentionPlan":
        """`kv_cache` [..., page_tokens, kv_dim]."""
        rotation = rotation_table.index_select(0, batch.positions)
        ragged = (batch.query_start, batch.kv_lengths, batch.block_table)
        page_tokens = kv_cache.shape[-2]
        if batch.form is AttentionForm.ABSORBED:
            groups = group_rows(*ragged, page_tokens)
            return cls(rotation=rotation, slots=batch.slots, groups=groups)
        device = kv_cache.device
        if path_of("mla_prefill", device) == "reference":
            rows = split_rows(*ragged, page_tokens)
            return cls(rotation=rotation, slots=batch.slots, rows=rows)
        # Planned on the host, where everything is fetched at once.
        query_start, kv_lengths, block_table = (each.cpu() for each in ragged)
        rows = split_rows(query_start, kv_lengths, block_table, page_tokens)
        most = max_keys(
            config.num_heads, config.qk_nope_head_dim + config.v_head_dim, kv_cache.itemsize
        )
        key_groups = plan_groups(rows, page_tokens, most, device)
        return cls(rotation=rotation, slots=batch.slots, key_groups=key_groups)
