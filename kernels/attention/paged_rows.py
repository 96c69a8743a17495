"""Host-side plan of one forward pass over paged KV, shared by all its layers.

Attention on ragged rows needs sizes on the host. They are read once a pass here (on a GPU this
is the only wait for the device), so that the kernels themselves never look.
"""

from dataclasses import dataclass

import torch

SLACK_TOKENS = 256  # padding that costs less than one more group


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: tokens start .. stop of the batch, the last ones of `kv_length` in the cache.

    pages  [ceil(kv_length / page_tokens)] int32, ids in token order
    """

    start: int
    stop: int
    kv_length: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with Q new tokens each and similar lengths, padded to the pages of the longest: S
    tokens. Whole pages, so that a row's bits rarely depend on what it is grouped with.

    tokens  [b * Q] int64, which tokens of the batch these are; None for all of them in order
    pages   [b * P] int32, P = pages of the longest row
    mask    [b, Q, S] float32, 0 where a query may look and -inf elsewhere
    """

    num_rows: int
    tokens: torch.Tensor | None
    pages: torch.Tensor
    mask: torch.Tensor


def split_rows(
    query_start: torch.Tensor,  # [B + 1] int32
    kv_lengths: torch.Tensor,  # [B] int32
    block_table: torch.Tensor,  # [B, P] int32
    page_tokens: int,
) -> tuple[Row, ...]:
    """Rows in batch order; those without new tokens are left out. Raises ValueError for lengths
    without pages, or without the new tokens."""
    starts, lengths = query_start.tolist(), kv_lengths.tolist()
    _check(starts, lengths, block_table, page_tokens)
    rows = []
    for index, kv_length in enumerate(lengths):
        start, stop = starts[index], starts[index + 1]
        if stop > start:
            if kv_length < stop - start:
                raise ValueError(f"row {index}: {stop - start} new tokens of {kv_length}")
            num_pages = -(-kv_length // page_tokens)
            rows.append(Row(start, stop, kv_length, block_table[index, :num_pages]))
    return tuple(rows)


def group_rows(
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_table: torch.Tensor,
    page_tokens: int,
) -> tuple[RowGroup, ...]:
    """Rows by number of new tokens and by length, so that at most half of a group's work, or
    SLACK_TOKENS a row, is padding. Raises ValueError for lengths without pages."""
    starts, lengths = query_start.tolist(), kv_lengths.tolist()
    _check(starts, lengths, block_table, page_tokens)
    counts = [starts[row + 1] - starts[row] for row in range(len(lengths))]
    members: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (counts[row], -lengths[row])):
        if counts[row] == 0:
            continue
        longest = members[-1][0] if members else row
        fits = 2 * lengths[row] + SLACK_TOKENS >= lengths[longest]
        if members and counts[row] == counts[longest] and fits:
            members[-1].append(row)
        else:
            members.append([row])
    if len(members) == 1 and len(members[0]) == len(lengths):
        members = [list(range(len(lengths)))]
    return tuple(row_group(rows, starts, lengths, block_table, page_tokens) for rows in members)


def row_group(
    rows: list[int],
    starts: list[int],
    lengths: list[int],
    block_table: torch.Tensor,
    page_tokens: int,
) -> RowGroup:
    device = block_table.device
    num_pages = -(-max(lengths[row] for row in rows) // page_tokens)
    num_queries = starts[rows[0] + 1] - starts[rows[0]]
    whole = rows == list(range(len(lengths)))
    pages, tokens = block_table[:, :num_pages], None
    if not whole:
        pages = pages.index_select(0, torch.tensor(rows, device=device))
        numbers = [t for row in rows for t in range(starts[row], starts[row + 1])]
        tokens = torch.tensor(numbers, device=device)
    # The last query of a row sees all its tokens, the one before all but one, and so on.
    limits = [[lengths[row] - num_queries + q for q in range(1, num_queries + 1)] for row in rows]
    keys = torch.arange(num_pages * page_tokens, device=device)
    hidden = keys >= torch.tensor(limits, device=device)[..., None]
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return RowGroup(len(rows), tokens, pages.reshape(-1), mask)


def _check(
    starts: list[int], lengths: list[int], block_table: torch.Tensor, page_tokens: int
) -> None:
    if block_table.dim() != 2 or not len(starts) - 1 == len(lengths) == len(block_table):
        raise ValueError(
            f"{len(starts) - 1} rows, {len(lengths)} lengths, pages {tuple(block_table.shape)}"
        )
    room = block_table.shape[1] * page_tokens
    for row, length in enumerate(lengths):
        if starts[row] != starts[row + 1] and not 0 < length <= room:
            raise ValueError(f"row {row} has {length} tokens and pages for {room}")
