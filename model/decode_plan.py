"""What all layers share in one decode step; made on the device, without waiting for it."""

from dataclasses import dataclass

import torch

from model.decode_batch import DecodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """
    rotation     [B, R / 2] complex64, of each row's position
    slots, kv_lengths, block_table  of the batch
    is_row       [B] bool, false for padding
    """

    rotation: torch.Tensor
    slots: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor
    is_row: torch.Tensor

    @classmethod
    def build(cls, batch: DecodeBatch, rotation_table: torch.Tensor) -> "DecodePlan":
        return cls(
            rotation=rotation_table.index_select(0, batch.positions),
            slots=batch.slots,
            kv_lengths=batch.kv_lengths,
            block_table=batch.block_table,
            is_row=batch.kv_lengths > 0,
        )
