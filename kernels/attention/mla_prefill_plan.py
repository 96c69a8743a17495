"""Which keys the rows of one prefill pass attend to at a time, so that keys and values of a bounded
number of tokens are expanded at once.

Keys of all rows are visited from the first to the last, in groups of at most `max_keys`. What a row
has in one group is a span of it: its new tokens against keys that follow each other. The first
span of a row begins with its first token, which every query sees; each further one is merged with
what there is. Made on the host once a pass, for all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.paged_rows import Row
from kernels.build.upload import upload_all

SCRATCH_BYTES = 256 << 20  # of expanded keys and values
LEAST_KEYS = 512
BLOCK_QUERIES = 128


@dataclass(frozen=True, slots=True)
class KeySpan:
    """New tokens query .. query + num_queries of the batch against keys key .. key + num_keys of
    the group. Query i sees those with j <= i + shift."""

    query: int
    num_queries: int
    key: int
    num_keys: int
    shift: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """
    slots   [keys] int64, where the latents are in the cache
    spans  of different rows
    blocks  [N, 6] int32, spans cut to BLOCK_QUERIES queries, in the order of the fields of KeySpan;
            those with most keys to look at first, those that see none left out
    drawn   [2] int32, zeros before and after a kernel, which counts here what it has begun
    """

    slots: torch.Tensor
    spans: tuple[KeySpan, ...]
    blocks: torch.Tensor
    drawn: torch.Tensor


def max_keys(num_heads: int, width: int, itemsize: int) -> int:
    """How many tokens' keys and values, `width` elements a head, fit into SCRATCH_BYTES."""
    return max(LEAST_KEYS, SCRATCH_BYTES // (num_heads * width * itemsize))


def plan_groups(
    rows: Sequence[Row], page_tokens: int, most: int, device: torch.device
) -> tuple[KeyGroup, ...]:
    """`most` keys a group."""
    groups: list[tuple[KeySpan, ...]] = []
    arrays: list[np.ndarray] = []  # slots and blocks of each group
    spans: list[KeySpan] = []
    slots: list[np.ndarray] = []
    used = 0

    def close() -> None:
        nonlocal used
        if spans:
            groups.append(tuple(spans))
            arrays.extend((np.concatenate(slots), _blocks(spans).ravel()))
        spans.clear()
        slots.clear()
        used = 0

    for row in rows:
        begin, num_queries = 0, row.stop - row.start
        pages = row.pages.cpu().numpy().astype(np.int64)
        of_row = (pages[:, None] * page_tokens + np.arange(page_tokens)).ravel()
        while begin < row.kv_length:
            if used == most:
                close()
            count = min(most - used, row.kv_length - begin)
            shift = row.kv_length - num_queries - begin
            spans.append(KeySpan(row.start, num_queries, used, count, shift, begin == 0))
            slots.append(of_row[begin : begin + count])
            used += count
            begin += count
    close()
    if not groups:
        return ()
    parts = upload_all(arrays, device)
    drawn = torch.zeros(len(groups), 2, dtype=torch.int32, device=device)
    return tuple(
        KeyGroup(of_group, each, blocks.view(-1, 6).to(torch.int32), of_kernel)
        for each, of_group, blocks, of_kernel in zip(
            groups, parts[::2], parts[1::2], drawn, strict=True
        )
    )


def _blocks(spans: Sequence[KeySpan]) -> np.ndarray:
    """[N, 6] int64."""
    blocks = []
    for span in spans:
        for first in range(0, span.num_queries, BLOCK_QUERIES):
            count = min(BLOCK_QUERIES, span.num_queries - first)
            shift = span.shift + first
            seen = min(span.num_keys, shift + count)
            if seen > 0:
                blocks.append((span.query + first, count, span.key, seen, shift, span.is_first))
    blocks.sort(key=lambda block: (-block[3], block))
    return np.array(blocks, dtype=np.int64).reshape(-1, 6)
