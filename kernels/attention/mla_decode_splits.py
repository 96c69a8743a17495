"""What parts of rows give of absorbed attention, before it is joined.

The tiles of TOKENS of all rows are one list, of which each part takes an equal stretch, the last
ones less or nothing. What part p has of row r is at place r + p: the list goes on in one of them at
each step, so that no two splits share a place.

    values  [rows + parts, lines, C]  bfloat16, weighted means of the tokens of a part
    lse     [rows + parts, lines]     float32, log2 of the sum of 2 ** scores of those tokens;
                                      -inf: a line that sees none

Places of no split hold anything. Lines are a row's queries x heads.
"""

import math
from dataclasses import dataclass

import torch

TOKENS = 64  # of a tile
MAX_QUERIES = 256  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """`min_tiles` is how many a part has at least."""

    values: torch.Tensor
    lse: torch.Tensor
    kv_lengths: torch.Tensor
    num_parts: int
    min_tiles: int
    num_queries: int


def join_reference(splits: Splits) -> torch.Tensor:
    """[B * Q, heads, C] in the type of values; zeros for rows without tokens."""
    num_lines, value_dim = splits.values.shape[1:]
    num_tiles = (splits.kv_lengths.long() + TOKENS - 1) // TOKENS
    ends = num_tiles.cumsum(0).tolist()
    per_part = max(-(-ends[-1] // splits.num_parts), splits.min_tiles)
    out = splits.values.new_zeros(len(ends), num_lines, value_dim)
    for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end:
            continue
        here = slice(row + begin // per_part, row + (end - 1) // per_part + 1)
        shares = (splits.lse[here].float() * math.log(2)).softmax(0)
        out[row] = (shares.unsqueeze(-1) * splits.values[here].float()).sum(0)
    return out.view(len(ends) * splits.num_queries, -1, value_dim)
