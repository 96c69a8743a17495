"""Batches as built from pieces, against the definition of each tensor token by token."""

import random
import time
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.runner import SequenceChunk, build_batch
from model.batch import AttentionForm

if TYPE_CHECKING:
    from model.batch import ForwardBatch

PAGE = 4
ROW = SampleRow(sampling=Sampling(), position=0)


def build(chunks: list[SequenceChunk], page_tokens: int = PAGE) -> "ForwardBatch":
    return build_batch(
        chunks,
        page_tokens=page_tokens,
        form=AttentionForm.PLAIN,
        tokens_per_rank=(sum(len(chunk.token_ids) for chunk in chunks),),
        device=torch.device("cpu"),
    )


@st.composite
def all_pieces(draw: st.DrawFn) -> list[SequenceChunk]:
    chunks = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 20))
        token_ids = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=11))
        least = -(-(start + len(token_ids)) // PAGE)
        pages = draw(st.lists(st.integers(0, 2**25), min_size=least, max_size=least + 3))
        row = draw(st.sampled_from([None, ROW]))
        chunks.append(SequenceChunk(token_ids=token_ids, start=start, pages=pages, sample=row))
    return chunks


@given(chunks=all_pieces())
def test_a_batch_is_what_its_docstring_says(chunks: list[SequenceChunk]) -> None:
    batch = build(chunks)
    tokens, positions, slots, rows, begins = [], [], [], [], [0]
    for chunk in chunks:
        for index, token in enumerate(chunk.token_ids):
            position = chunk.start + index
            tokens.append(token)
            positions.append(position)
            slots.append(chunk.pages[position // PAGE] * PAGE + position % PAGE)
        begins.append(len(tokens))
        if chunk.sample is not None:
            rows.append(len(tokens) - 1)
    lengths = [chunk.start + len(chunk.token_ids) for chunk in chunks]
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logit_rows.tolist() == rows
    assert batch.query_start.tolist() == begins
    assert batch.kv_lengths.tolist() == lengths
    width = max((-(-length // PAGE) for length in lengths), default=0)
    assert batch.block_table.shape == (len(chunks), width)
    for chunk, length, blocks in zip(chunks, lengths, batch.block_table.tolist(), strict=True):
        used = -(-length // PAGE)
        assert blocks == [*chunk.pages[:used], *[0] * (width - used)]
    longs = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    assert {tensor.dtype for tensor in longs} == {torch.int64}
    ints = (batch.query_start, batch.kv_lengths, batch.block_table)
    assert {tensor.dtype for tensor in ints} == {torch.int32}


def test_an_empty_piece_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        build([SequenceChunk(token_ids=[], start=0, pages=[])])


def test_building_a_decode_batch_costs_little() -> None:
    """16 requests of a thousand tokens: well under a millisecond even on a busy machine."""
    shuffled = random.Random(0).sample(range(10_000), 320)
    chunks = [
        SequenceChunk(
            token_ids=[5], start=1000 + i, pages=shuffled[20 * i : 20 * i + 20], sample=ROW
        )
        for i in range(16)
    ]
    build(chunks, page_tokens=64)
    begin = time.process_time()
    for _ in range(200):
        build(chunks, page_tokens=64)
    assert (time.process_time() - begin) / 200 < 0.001


def test_every_part_of_a_batch_begins_at_a_multiple_of_16_bytes() -> None:
    """Kernels are compiled for how their operands are aligned, some once more for others."""
    for num_prompts in range(1, 6):
        chunks = [
            SequenceChunk(token_ids=[1, 2, 3], start=0, pages=[0]) for _ in range(num_prompts)
        ]
        batch = build(chunks)
        first = batch.token_ids.data_ptr()
        parts = (batch.positions, batch.slots, batch.logit_rows, *batch.rows.parts)
        assert not any((part.data_ptr() - first) % 16 for part in parts)
        assert batch.kv_lengths.tolist() == num_prompts * [3]
        assert batch.query_start.tolist() == list(range(0, 3 * num_prompts + 1, 3))
