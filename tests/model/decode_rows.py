"""The same step as a ragged batch and as one of fixed sizes."""

import torch
import torch.nn.functional as F

from model.batch import DecodeBatch, ForwardBatch


def decode_batch(batch: ForwardBatch, size: int, max_pages: int | None = None) -> DecodeBatch:
    """`batch`, one new token a row, padded to `size` rows and `max_pages` pages. Padding has a
    token and a position that rows have too."""
    more = size - len(batch.token_ids)
    pages = (max_pages or batch.block_table.shape[1]) - batch.block_table.shape[1]
    return DecodeBatch(
        token_ids=F.pad(batch.token_ids, (0, more), value=7),
        positions=F.pad(batch.positions, (0, more), value=3),
        kv_lengths=F.pad(batch.kv_lengths, (0, more)),
        block_table=F.pad(batch.block_table, (0, pages, 0, more)),
        slots=F.pad(batch.slots, (0, more), value=-1),
    )


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median of the rows' errors: in bfloat16 a gate that is nearly even may turn for a row."""
    errors = [norm_error(one, other) for one, other in zip(got, want, strict=True)]
    return sorted(errors)[len(errors) // 2]
