"""What all layers share in one decode step; made on the device, without waiting for it."""

from dataclasses import dataclass

import torch

from kernels.attention.mla_decode import mla_decode_schedule
from model.decode_batch import DecodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """
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
