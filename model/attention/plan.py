"""What the attention of all layers shares in one forward pass; decided on the host."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.mla_decode import mla_decode_schedule
from kernels.attention.mla_decode_splits import MAX_QUERIES
from kernels.attention.mla_prefill_plan import KeyGroup, max_keys, plan_groups
from kernels.attention.paged_rows import Row, RowGroup, group_rows, split_rows
from kernels.build.paths import best_path
from kernels.build.upload import upload_all
from model.attention.form import attention_form
from model.batch import AttentionForm, DecodeBatch, ForwardBatch
from model.config import ModelConfig

# One in so many tokens at most: each is attended to by itself.
WANTED_SHARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """What `mla_decode.mla_decode_paged` needs of b rows with Q queries each, a power of
    two: a row's new tokens, after as many others as it takes to fill up.

    block_table  [b, P] int32
    kv_lengths   [b] int32
    queries      [b * Q] int64, which token of the batch each one is
    kept         [n] int64, those that are no filling
    tokens       [n] int64, which token of the batch each of them is; None: rows, queries and
                 tokens are those of the batch, in its order
    """

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    schedule: object | None
    queries: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Where there are kernels, `key_groups` for rows in plain form and `paged` for those in
    absorbed form. Else `rows` in plain form, or `groups` in absorbed form.

    rotation  [T, R / 2] complex64, of each token's position
    slots     [T] int64
    wanted    the batch's logit rows in absorbed form, a row each: the last layer needs no others.
              None where they are too many for that to be cheaper
    """

    rotation: torch.Tensor
    slots: torch.Tensor
    rows: tuple[Row, ...] = ()
    groups: tuple[RowGroup, ...] = ()
    key_groups: tuple[KeyGroup, ...] = ()
    paged: tuple[PagedRows, ...] = ()
    wanted: PagedRows | None = None

    @classmethod
    def build(
        cls,
        batch: ForwardBatch,
        config: ModelConfig,
        rotation_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> "AttentionPlan":
        """`kv_cache` [..., page_tokens, kv_dim]. In plain form on a GPU, rows for which the
        absorbed one is cheaper are in that."""
        page_tokens, device = kv_cache.shape[-2], kv_cache.device
        shared = {
            "rotation": rotation_table.index_select(0, batch.positions),
            "slots": batch.slots,
        }
        has_paged = best_path("mla_decode", device) != "reference"
        if batch.form is AttentionForm.ABSORBED:
            rows = split_rows(*batch.host_rows.parts, page_tokens) if has_paged else ()
            if rows and all(_num_queries(row) for row in rows):
                return cls(**shared, paged=paged_rows(batch, rows, config.num_heads))
            return cls(**shared, groups=group_rows(*batch.rows.parts, page_tokens))
        if best_path("mla_prefill", device) == "reference":
            return cls(**shared, rows=split_rows(*batch.rows.parts, page_tokens))
        plain: Sequence[Row] = split_rows(*batch.host_rows.parts, page_tokens)
        absorbed: Sequence[Row] = ()
        if has_paged:
            plain, absorbed = split_forms(plain)
        most = max_keys(
            config.num_heads, config.qk_nope_head_dim + config.v_head_dim, kv_cache.itemsize
        )
        return cls(
            **shared,
            key_groups=plan_groups(plain, page_tokens, most, device),
            paged=paged_rows(batch, absorbed, config.num_heads),
            wanted=wanted_rows(batch, config.num_heads) if has_paged else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What all layers share in one decode step; made on the device, without waiting for it.

    rotation     [B, R / 2] complex64, of each row's position
    slots, kv_lengths, block_table  of the batch
    is_row       [B] bool, false for padding
    schedule     of `kernels.attention.mla_decode`
    """

    rotation: torch.Tensor
    slots: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor
    is_row: torch.Tensor
    schedule: object | None

    @classmethod
    def build(
        cls, batch: DecodeBatch, rotation_table: torch.Tensor, num_heads: int
    ) -> "DecodePlan":
        return cls(
            rotation=rotation_table.index_select(0, batch.positions),
            slots=batch.slots,
            kv_lengths=batch.kv_lengths,
            block_table=batch.block_table,
            is_row=batch.kv_lengths > 0,
            schedule=mla_decode_schedule(batch.kv_lengths, num_queries=1, num_heads=num_heads),
        )


def split_forms(rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(in plain form, in absorbed form)."""
    plain: list[Row] = []
    absorbed: list[Row] = []
    for row in rows:
        num_new = row.stop - row.start
        form = attention_form(row.kv_length - num_new, num_new)
        is_absorbed = form is AttentionForm.ABSORBED and _num_queries(row)
        (absorbed if is_absorbed else plain).append(row)
    return tuple(plain), tuple(absorbed)


def paged_rows(batch: ForwardBatch, rows: Sequence[Row], num_heads: int) -> tuple[PagedRows, ...]:
    """Of any of the batch's rows that `_num_queries` has a number for."""
    counts = {row.stop - row.start for row in rows}
    if len(counts) == 1 and len(rows) == len(batch.kv_lengths):
        schedule = mla_decode_schedule(
            batch.kv_lengths, num_queries=counts.pop(), num_heads=num_heads
        )
        table, lengths = batch.block_table, batch.kv_lengths
        return (PagedRows(block_table=table, kv_lengths=lengths, schedule=schedule),)
    by_queries: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_queries[_num_queries(row)].append(row)
    device = batch.kv_lengths.device
    return tuple(
        _filled_up(alike, num_queries, num_heads, device)
        for num_queries, alike in sorted(by_queries.items())
    )


def wanted_rows(batch: ForwardBatch, num_heads: int) -> PagedRows | None:
    """The logit rows of a batch, each with the keys before it; nothing waits for the device.
    None when they are none, or more than a WANTED_SHARE of the tokens, and where all tokens go
    on."""
    if batch.wanted_per_rank is None:
        return None
    if not 0 < WANTED_SHARE * len(batch.logit_rows) <= len(batch.token_ids):
        return None
    ends, wanted = batch.query_start[1:].contiguous(), batch.logit_rows
    row_of = torch.searchsorted(ends, wanted.to(ends.dtype), right=True)
    lengths = batch.positions.index_select(0, wanted).add_(1).to(torch.int32)
    return PagedRows(
        block_table=batch.block_table.index_select(0, row_of),
        kv_lengths=lengths,
        schedule=mla_decode_schedule(lengths, num_queries=1, num_heads=num_heads),
    )


def _num_queries(row: Row) -> int:
    """Its new tokens, filled up; 0: too many, or the first of the filling would see no key."""
    filled_up = 1 << (row.stop - row.start - 1).bit_length()
    return filled_up if filled_up <= min(MAX_QUERIES, row.kv_length) else 0


def _filled_up(
    rows: Sequence[Row], num_queries: int, num_heads: int, device: torch.device
) -> PagedRows:
    starts = np.array([row.start for row in rows])
    fillings = num_queries - np.array([row.stop for row in rows]) + starts
    index = np.arange(num_queries) - fillings[:, None]
    queries = (starts[:, None] + np.maximum(index, 0)).ravel()
    kept = np.flatnonzero(index.ravel() >= 0)
    lengths = np.array([row.kv_length for row in rows])
    table = np.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.pages)] = row.pages.numpy()
    on_device = upload_all((queries, kept, queries[kept], lengths, table.ravel()), device)
    kv_lengths = on_device[3].to(torch.int32)
    return PagedRows(
        block_table=on_device[4].to(torch.int32).view(table.shape),
        kv_lengths=kv_lengths,
        schedule=mla_decode_schedule(kv_lengths, num_queries=num_queries, num_heads=num_heads),
        queries=on_device[0],
        kept=on_device[1],
        tokens=on_device[2],
    )
