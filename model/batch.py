"""What one forward pass works on: ragged rows of tokens over paged KV."""

from dataclasses import dataclass
from enum import Enum

import torch


class AttentionForm(Enum):
    """PLAIN expands latents to per-head keys and values (prefill); ABSORBED folds kv_b into
    the query and the output and attends over latents (decode). Same numbers, other costs."""

    PLAIN = "plain"
    ABSORBED = "absorbed"


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
    tokens_per_rank  T of every rank of the EP group, this one's included
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
