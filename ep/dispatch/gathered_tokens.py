"""The tokens of all ranks on each of them, by one all-gather of equally many packed rows."""

from collections.abc import Callable

import torch

from ep.dispatch.dispatcher import Payload
from ep.group.collectives import Collectives
from kernels.moe.pack_tokens import Unpacked, pack_tokens, unpack


def gather_tokens(
    collectives: Collectives,
    num_ranks: int,
    hidden: torch.Tensor,  # [T, H]
    topk_idx: torch.Tensor,  # [T, K] integers
    weights: torch.Tensor,  # [T, K] float32
    payload: Payload,
    longest: int,  # T of the rank that has most
    meanwhile: Callable[[], None] | None,
) -> Unpacked:
    """N = ranks * longest rows, those of rank r from r * longest on, with ids of -1 where a rank
    has no such token. `meanwhile` is called while they travel."""
    own = pack_tokens(
        hidden,
        topk_idx,
        weights,
        longest,
        quantises=payload.quantises,
        scale=payload.scale,
    )
    everything = own.new_empty((num_ranks * longest, own.shape[1]))
    collectives.all_gather(everything, own, meanwhile)
    width, num_choices = hidden.shape[1], topk_idx.shape[1]
    dtype = torch.float8_e4m3fn if payload.quantises else hidden.dtype
    return unpack(everything, width, num_choices, dtype, payload.num_scales(width))
