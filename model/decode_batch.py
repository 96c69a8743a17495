"""What one captured decode step works on: fixed shapes, everything on the device."""

from dataclasses import dataclass

import torch


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
