"""The tokens of all ranks on each of them, by one all-gather of equally many packed rows.

A packed row is, in whole 32-bit words: the hidden row as it travels, its scales if it has some, K
expert ids, K weights; padded to ROW_WORDS, so that rows stay aligned in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep.collectives import Collectives
from ep.masked_rows import Rows

ROW_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTokens:
    """N = ranks * longest rows, those of rank r from r * longest on; views of packed rows.

    rows      values [N, H], and scales [N, H / 128] float32 or None
    topk_idx  [N, K] int32, -1 where a rank has no such token
    weights   [N, K] float32
    """

    rows: Rows
    topk_idx: torch.Tensor
    weights: torch.Tensor


def gather_tokens(
    collectives: Collectives,
    num_ranks: int,
    rows: Rows,
    topk_idx: torch.Tensor,  # [T, K] integers
    weights: torch.Tensor,  # [T, K] float32
    longest: int,  # T of the rank that has most
    meanwhile: Callable[[], None] | None,
) -> GatheredTokens:
    """`meanwhile` is called while the rows travel."""
    values, scales = rows
    num_tokens, num_choices = topk_idx.shape
    width = values.shape[1]
    assert values.element_size() in (1, 2, 4), values.dtype
    num_words = [-(-width * values.element_size() // 4), 0 if scales is None else scales.shape[1]]
    ends = [num_words[0], sum(num_words), sum(num_words) + num_choices]
    padded = -(-(ends[2] + num_choices) // ROW_WORDS) * ROW_WORDS
    own = torch.empty((longest, padded), dtype=torch.int32, device=values.device)
    own[:num_tokens, : ends[0]].view(values.dtype)[:, :width] = values
    if scales is not None:
        own[:num_tokens, ends[0] : ends[1]].view(torch.float32).copy_(scales)
    own[:num_tokens, ends[1] : ends[2]] = topk_idx
    own[num_tokens:] = 0
    own[num_tokens:, ends[1] : ends[2]] = -1
    own[:num_tokens, ends[2] : ends[2] + num_choices].view(torch.float32).copy_(weights)
    everything = own.new_empty((num_ranks * longest, padded))
    collectives.all_gather(everything, own, meanwhile)
    floats = everything.view(torch.float32)
    return GatheredTokens(
        rows=(
            everything[:, : ends[0]].view(values.dtype)[:, :width],
            None if scales is None else floats[:, ends[0] : ends[1]],
        ),
        topk_idx=everything[:, ends[1] : ends[2]],
        weights=floats[:, ends[2] : ends[2] + num_choices],
    )
