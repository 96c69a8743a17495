"""What the dispatchers of fixed sizes have in common: rows as they travel, and their blocks."""

import torch

from ep.dispatch.dispatcher import Payload, Rows
from kernels.build.aligned_rows import ALIGNMENT
from kernels.elementwise.quantise import quantise
from kernels.moe.masked_rows import MaskedRows
from kernels.moe.permute_masked import permute_masked


def as_payload(hidden: torch.Tensor, payload: Payload) -> Rows:
    """Hidden states [T, H] as they travel."""
    if not payload.quantises:
        return hidden, None
    values, scales = quantise(hidden, scale=payload.scale)
    return values, scales if payload.scale is None else None


def blocks_of(
    rows: Rows, topk_idx: torch.Tensor, num_slots: int, *, first: int = 0, quantises: bool = False
) -> MaskedRows:
    """A block for each slot, of as many rows as there are; `first` is the first slot's id.
    `quantises`: they become FP8 on the way."""
    values, scales = rows
    capacity = len(values)
    # FP8 products on GPUs work on whole tiles.
    if values.is_cuda and (quantises or values.dtype == torch.float8_e4m3fn):
        capacity = -(-capacity // ALIGNMENT) * ALIGNMENT
    return permute_masked(
        values, topk_idx, num_slots, capacity, first=first, scale=scales, quantises=quantises
    )


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """ValueError for more than there are buffers for."""
    if num_tokens > max_tokens:
        raise ValueError(f"{num_tokens} tokens in a dispatch for at most {max_tokens}")


def mean_rows(num_choices: int, num_slots: int) -> int:
    """Of a slot, when so many choices go evenly to so many slots; at least 1."""
    return max(1, -(-num_choices // num_slots))
