"""What one pass works on: ragged rows of tokens over paged KV, or one new token of each row."""

from dataclasses import dataclass
from enum import Enum

import torch


class AttentionForm(Enum):
    """PLAIN expands latents to per-head keys and values (prefill); ABSORBED folds kv_b into
    the query and the output and attends over latents (decode). Same numbers, other costs."""

    PLAIN = "plain"
    ABSORBED = "absorbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """query_start [B + 1], kv_lengths [B] and block_table [B, P] of a `ForwardBatch`, int32."""

    query_start: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query_start, self.kv_lengths, self.block_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of B sequences (rows); B and T may be 0 for a rank with nothing to do.

    token_ids    [T] int64
    positions    [T] int64, absolute
    query_start  [B + 1] int32, row b owns tokens query_start[b] .. query_start[b + 1]
    kv_lengths   [B] int32, tokens in the cache after this pass, the new ones included
    block_table  [B, P] int32, page ids in token order, padded with 0
    slots        [T] int64, page id * page_tokens + offset: where each token's latent goes
    logit_rows   [S] int64, indices into T whose logits are wanted
    following    [T] int64, the token after each, of which an MTP layer's KV is made; None: not made
    tokens_per_rank  T of every rank of the EP group, this one's included
    rows_per_rank    S of every rank; None where several have not told each other
    on_host      the same rows in memory of the host; None: fetched from the device by whoever
                 needs them, who waits for it
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    form: AttentionForm
    tokens_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int, ...] | None = None
    on_host: RaggedRows | None = None
    following: torch.Tensor | None = None

    @property
    def wanted_per_rank(self) -> tuple[int, ...] | None:
        """S of every rank, which is what goes on after the last attention; None: not known of
        all, so T does."""
        if len(self.tokens_per_rank) == 1:
            return (len(self.logit_rows),)
        return self.rows_per_rank

    @property
    def rows(self) -> RaggedRows:
        """On the device."""
        return RaggedRows(
            query_start=self.query_start, kv_lengths=self.kv_lengths, block_table=self.block_table
        )

    @property
    def host_rows(self) -> RaggedRows:
        if self.on_host is not None:
            return self.on_host
        return RaggedRows(
            query_start=self.query_start.cpu(),
            kv_lengths=self.kv_lengths.cpu(),
            block_table=self.block_table.cpu(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """One new token of each of B rows. The tensors keep their places, so that a captured CUDA
    graph finds the next step's values in them. All ranks of the EP group have the same B; rows
    after a rank's own are padding.

    token_ids    [B] int64
    positions    [B] int64, absolute
    kv_lengths   [B] int32, tokens in the cache after this pass, the new one included; 0: padding,
                 a row that is neither written, nor attended, nor sent to an expert
    block_table  [B, P] int32, page ids in token order, padded with 0
    slots        [B] int64, page id * page_tokens + offset, where the token's latent goes; -1 for
                 padding
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
