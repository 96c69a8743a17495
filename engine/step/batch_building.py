"""From pieces of requests to the tensors of a forward pass."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from engine.step.sequence_chunk import SequenceChunk
from kernels.build.upload import upload
from model.batch import AttentionForm, ForwardBatch, RaggedRows

Buffer = TypeVar("Buffer", np.ndarray, torch.Tensor)


def build_batch(
    chunks: Sequence[SequenceChunk],
    *,
    page_tokens: int,
    form: AttentionForm,
    tokens_per_rank: tuple[int, ...],
    rows_per_rank: tuple[int, ...] | None = None,
    device: torch.device,
) -> ForwardBatch:
    """All tensors of the batch are views of one buffer: one allocation, one copy to the device."""
    counts = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    num_pages = -(-(starts + counts) // page_tokens)
    num_rows, num_tokens, width = len(chunks), int(counts.sum()), int(num_pages.max(initial=0))
    num_logits = np.array([chunk.num_rows for chunk in chunks], dtype=np.int64)
    # Who prefills makes the KV of an MTP layer, too, if there is one.
    num_following = num_tokens if form is AttentionForm.PLAIN else 0
    sizes = (
        *(num_tokens, num_tokens, num_tokens, int(num_logits.sum()), num_following),
        *(num_rows + 1, num_rows, num_rows * width),
    )
    buffer = np.zeros(_num_longs(sizes), dtype=np.int64)
    host = _views(buffer, sizes, np.int32)
    token_ids, positions, slots, logit_rows, following, query_start, kv_lengths, block_table = host
    blocks = block_table.reshape(num_rows, width)
    np.cumsum(counts, out=query_start[1:])
    kv_lengths[:] = starts + counts
    for row, chunk in enumerate(chunks):
        assert chunk.token_ids, "an empty piece"
        token_ids[query_start[row] : query_start[row + 1]] = chunk.token_ids
        blocks[row, : num_pages[row]] = chunk.pages[: num_pages[row]]
    if num_following:
        following[:-1] = token_ids[1:]
        following[query_start[1:] - 1] = [chunk.following for chunk in chunks]
    row_of = np.repeat(np.arange(num_rows), counts)
    positions[:] = np.arange(num_tokens) + (starts - query_start[:-1])[row_of]
    page, offset = np.divmod(positions, page_tokens)
    slots[:] = blocks[row_of, page].astype(np.int64) * page_tokens + offset
    # Each piece's last rows, in order.
    logit_rows[:] = np.arange(len(logit_rows))
    logit_rows[:] += np.repeat(query_start[1:] - num_logits.cumsum(), num_logits)
    parts = _views(upload(buffer, device), sizes, torch.int32)
    return ForwardBatch(
        token_ids=parts[0],
        positions=parts[1],
        slots=parts[2],
        logit_rows=parts[3],
        following=parts[4] if form is AttentionForm.PLAIN else None,
        query_start=parts[5],
        kv_lengths=parts[6],
        block_table=parts[7].reshape(num_rows, width),
        form=form,
        tokens_per_rank=tokens_per_rank,
        rows_per_rank=rows_per_rank,
        on_host=RaggedRows(
            query_start=torch.from_numpy(query_start),
            kv_lengths=torch.from_numpy(kv_lengths),
            block_table=torch.from_numpy(blocks),
        ),
    )


NUM_INT64_PARTS = 5  # the first ones; those after them are int32


def _num_longs(sizes: Sequence[int]) -> int:
    """Length of the int64 buffer."""
    return sum(_longs_of(index, size) for index, size in enumerate(sizes))


def _longs_of(index: int, size: int) -> int:
    """A pair more or less: every part begins at a multiple of 16 bytes. Triton would compile its
    kernels once more for others."""
    num_longs = size if index < NUM_INT64_PARTS else -(-size // 2)
    return num_longs + num_longs % 2


def _views(buffer: Buffer, sizes: Sequence[int], int32: Any) -> list[Buffer]:  # noqa: ANN401
    """The parts of a buffer, of numpy or torch alike; `int32` is the library's own dtype."""
    parts, begin = [], 0
    for index, size in enumerate(sizes):
        end = begin + _longs_of(index, size)
        part = buffer[begin:end]
        parts.append((part if index < NUM_INT64_PARTS else part.view(int32))[:size])
        begin = end
    return parts
