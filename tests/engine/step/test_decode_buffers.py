"""Fixed places of a decode step: what lies in them, and that they stay where they are."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step.decode_buffers import NUM_HOST_BUFFERS, DecodeBuffers, split_parts

PAGE, MAX_ROWS, MAX_PAGES = 4, 6, 5


@dataclass(frozen=True)
class Row:
    token_ids: list[int]
    start: int
    pages: list[int]
    num_seen: int = 0


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    made = []
    for _ in range(draw(st.integers(0, MAX_ROWS))):
        start = draw(st.integers(0, PAGE * MAX_PAGES - 1))
        pages = draw(st.lists(st.integers(1, 2**25), min_size=MAX_PAGES, max_size=MAX_PAGES + 2))
        made.append(Row([draw(st.integers(0, 2**31))], start, pages))
    return made


def buffers() -> DecodeBuffers:
    return DecodeBuffers(
        max_rows=MAX_ROWS, max_pages=MAX_PAGES, page_tokens=PAGE, device=torch.device("cpu")
    )


@settings(max_examples=40)
@given(st.lists(st.tuples(rows(), st.integers(0, 3)), min_size=1, max_size=3 * NUM_HOST_BUFFERS))
def test_a_batch_is_what_its_docstring_says_whatever_was_there_before(
    steps: list[tuple[list[Row], int]],
) -> None:
    made = buffers()
    for step, padding in steps:
        size = min(MAX_ROWS, max(1, len(step) + padding))
        batch = made.fill(step, size)
        empty = size - len(step)
        assert batch.token_ids.tolist() == [row.token_ids[0] for row in step] + [0] * empty
        assert batch.positions.tolist() == [row.start for row in step] + [0] * empty
        assert batch.kv_lengths.tolist() == [row.start + 1 for row in step] + [0] * empty
        assert (
            batch.slots.tolist()
            == [row.pages[row.start // PAGE] * PAGE + row.start % PAGE for row in step]
            + [-1] * empty
        )
        used = [row.pages[: row.start // PAGE + 1] for row in step] + [[]] * empty
        assert batch.block_table.tolist() == [
            pages + [0] * (MAX_PAGES - len(pages)) for pages in used
        ]


def test_tensors_keep_their_places_and_types() -> None:
    made = buffers()
    first = made.batch(3)
    assert made.fill([Row([7], 5, [1, 2])], 3) is first
    assert (first.token_ids.dtype, first.positions.dtype, first.slots.dtype) == (torch.int64,) * 3
    assert (first.kv_lengths.dtype, first.block_table.dtype) == (torch.int32,) * 2
    tensors = (first.token_ids, first.positions, first.slots, first.kv_lengths, first.block_table)
    assert all(tensor.is_contiguous() for tensor in tensors)
    base = first.token_ids.data_ptr()
    assert all((tensor.data_ptr() - base) % 128 == 0 for tensor in tensors)
    assert made.batch(MAX_ROWS).token_ids.data_ptr() == base


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
def test_parts_of_a_size_do_not_overlap(size: int) -> None:
    buffer = torch.zeros(4096, dtype=torch.int64)
    longs, lengths, table = split_parts(buffer, size, 7)
    for index, part in enumerate((longs[0], longs[1], longs[2], lengths, table), start=1):
        assert not part.any()
        part.fill_(index)
    assert longs.tolist() == [[1] * size, [2] * size, [3] * size]
    assert lengths.tolist() == [4] * size


def test_more_pages_than_there_are_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        buffers().fill([Row([1], PAGE * MAX_PAGES, list(range(MAX_PAGES + 1)))], 1)
    shuffled = random.Random(0).sample(range(100), MAX_PAGES)
    with pytest.raises(AssertionError):
        buffers().fill([Row([1], 0, shuffled)] * 2, 1)
