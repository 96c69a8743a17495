"""Where the values of a decode step lie: fixed places on the device, filled by one copy a step.

    buffers = DecodeBuffers(max_rows=128, max_pages=512, page_tokens=64, device=device)
    batch = buffers.batch(8)          # the DecodeBatch that a graph of 8 rows is captured with
    buffers.fill(pieces, 8)           # enqueues the copy of the next step's values into it

With a `width` each request has so many rows, one for each of its tokens, and the rest is padding:
a size stands for `width` times as many rows.

All sizes are views of one allocation, each with parts of its own inside: the parts of a size
follow each other without a gap that depends on the largest, so that one copy brings them all.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from model.batch import DecodeBatch

# A host buffer is written while the copies of earlier steps may still wait for the device.
NUM_HOST_BUFFERS = 3
ALIGNED_LONGS = 16  # parts begin at multiples of 128 bytes
NUM_LONG_PARTS = 3


class DecodeRow(Protocol):
    """Consecutive tokens of one request, as `engine.step.runner.SequenceChunk` has them. The first
    `num_seen` have their KV: they are computed for their states."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def num_seen(self) -> int: ...


@dataclass(slots=True)
class HostBuffer:
    """`longs` is pinned where the device is a GPU; `copied` is recorded after each copy. Written
    last for `num_rows` (0: never), of whose block tables the first `num_columns` are used."""

    longs: torch.Tensor
    copied: torch.cuda.Event | None
    num_rows: int = 0
    num_columns: int = 0


class DecodeBuffers:
    """`max_rows` of one token each; `max_pages` is the width of block tables: pages of the longest
    request there can be."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_pages: int,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self._max_pages = max_pages
        self._page_tokens = page_tokens
        num_longs = part_begins(max_rows, max_pages)[-1]
        self._device_longs = torch.zeros(num_longs, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._ring = itertools.cycle(
            HostBuffer(
                torch.zeros(num_longs, dtype=torch.int64, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(NUM_HOST_BUFFERS)
        )
        self._batches: dict[int, DecodeBatch] = {}

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._device_longs.nbytes

    def batch(self, size: int, width: int = 1) -> DecodeBatch:
        """The batch of `size` requests; always the same tensors."""
        num_rows = size * width
        if num_rows not in self._batches:
            longs, ints, table = split_parts(self._device_longs, num_rows, self._max_pages)
            self._batches[num_rows] = DecodeBatch(
                token_ids=longs[0],
                positions=longs[1],
                slots=longs[2],
                kv_lengths=ints,
                block_table=table,
            )
        return self._batches[num_rows]

    def fill(self, rows: Sequence[DecodeRow], size: int, width: int = 1) -> DecodeBatch:
        """Puts `rows`, at most `size`, into the batch of that size; the rest becomes padding. On a
        GPU this is enqueued on the current stream."""
        assert len(rows) <= size, (len(rows), size)
        host = next(self._ring)
        if host.copied is not None:
            host.copied.synchronize()
        num_rows = size * width
        stale = host.num_columns if host.num_rows in (0, num_rows) else self._max_pages
        host.num_columns = self._write(host.longs, rows, size, width, stale)
        host.num_rows = num_rows
        num_longs = part_begins(num_rows, self._max_pages)[-1]
        self._device_longs[:num_longs].copy_(host.longs[:num_longs], non_blocking=True)
        if host.copied is not None:
            host.copied.record()
        return self.batch(size, width)

    def _write(
        self, buffer: torch.Tensor, rows: Sequence[DecodeRow], size: int, width: int, stale: int
    ) -> int:
        """Writes all parts; of the block table, `stale` columns hold something else than 0.
        Returns how many columns do afterwards."""
        longs, kv_lengths, table = (
            part.numpy() for part in split_parts(buffer, size * width, self._max_pages)
        )
        num_rows, page_tokens = len(rows), self._page_tokens
        counts = _array([len(row.token_ids) for row in rows])
        assert counts.max(initial=0) <= width, "more tokens than rows"
        starts = _array([row.start for row in rows])
        # What is drafted behind them is written as far as there are pages.
        wanted = (starts + counts + width - 2) // page_tokens + 1
        num_pages = np.minimum(wanted, _array([len(row.pages) for row in rows]))
        num_columns = int(num_pages.max(initial=0))
        assert num_columns <= self._max_pages, (num_columns, self._max_pages)
        table[:, : max(stale, num_columns)] = 0
        flat = [row.pages[:count] for row, count in zip(rows, num_pages.tolist(), strict=True)]
        page_ids = np.fromiter(
            itertools.chain.from_iterable(flat), dtype=np.int32, count=int(num_pages.sum())
        )
        of_request = table.reshape(size, width, self._max_pages)
        row_of, column = np.repeat(np.arange(num_rows), num_pages), _from_zero(num_pages)
        of_request[row_of, :, column] = page_ids[:, None]
        index = _from_zero(counts)
        row_of = np.repeat(np.arange(num_rows), counts)
        places, positions = row_of * width + index, starts[row_of] + index
        longs[:2] = 0
        longs[2] = -1
        kv_lengths[:] = 0
        longs[0, places] = np.fromiter(
            itertools.chain.from_iterable(row.token_ids for row in rows), dtype=np.int64
        )
        longs[1, places] = positions
        page = table[places, positions // page_tokens].astype(np.int64)
        is_seen = index < _array([row.num_seen for row in rows])[row_of]
        longs[2, places] = np.where(is_seen, -1, page * page_tokens + positions % page_tokens)
        kv_lengths[places] = positions + 1
        return num_columns


def _array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _from_zero(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def part_begins(size: int, max_pages: int) -> tuple[int, ...]:
    """Where the five parts of a size begin, in int64 elements, and where the last one ends."""
    lengths = (*[size] * NUM_LONG_PARTS, (size + 1) // 2, (size * max_pages + 1) // 2)
    aligned = (-(-length // ALIGNED_LONGS) * ALIGNED_LONGS for length in lengths)
    return tuple(itertools.accumulate(aligned, initial=0))


def split_parts(
    buffer: torch.Tensor, size: int, max_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[3, size] int64 (token ids, positions, slots), [size] int32 (lengths), [size, P] int32."""
    begins = part_begins(size, max_pages)
    longs = buffer.as_strided((NUM_LONG_PARTS, size), (begins[1], 1))
    lengths = buffer[begins[3] : begins[4]].view(torch.int32)[:size]
    table = buffer[begins[4] : begins[5]].view(torch.int32)[: size * max_pages]
    return longs, lengths, table.view(size, max_pages)
