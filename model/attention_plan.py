"""What the attention of all layers shares in one forward pass; decided on the host."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.mla_decode import MAX_QUERIES, mla_decode_schedule
from kernels.mla_prefill_plan import KeyGroup, max_keys, plan_groups
from kernels.paged_rows import Row, RowGroup, group_rows, split_rows
from kernels.paths import path_of
from model.batch import AttentionForm, ForwardBatch
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """What `kernels.mla_decode.mla_decode_paged` needs, the same number of new tokens a row."""

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    schedule: object | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """In plain form `rows`, or `key_groups` where there is a kernel for them; in absorbed form
    `groups`, or `paged` where there is a kernel and it can be.

    rotation  [T, R / 2] complex64, of each token's position
    slots     [T] int64
    """

    rotation: torch.Tensor
    slots: torch.Tensor
    rows: tuple[Row, ...] = ()
    key_groups: tuple[KeyGroup, ...] = ()
    groups: tuple[RowGroup, ...] = ()
    paged: PagedRows | None = None

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
            paged = paged_rows(batch, config.num_heads)
            if paged is not None:
                return cls(rotation=rotation, slots=batch.slots, paged=paged)
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


def paged_rows(batch: ForwardBatch, num_heads: int) -> PagedRows | None:
    """None where there is no kernel for them, or rows differ in their number of new tokens."""
    if path_of("mla_decode", batch.kv_lengths.device) == "reference":
        return None
    starts = batch.query_start.tolist()
    counts = {stop - start for start, stop in pairwise(starts)}
    if len(counts) != 1 or max(counts) > MAX_QUERIES:
        return None
    schedule = mla_decode_schedule(batch.kv_lengths, num_queries=counts.pop(), num_heads=num_heads)
    return PagedRows(block_table=batch.block_table, kv_lengths=batch.kv_lengths, schedule=schedule)
