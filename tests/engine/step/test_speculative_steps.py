"""Steps with drafts against whole passes of the model and its MTP layer; acceptance that is made
up."""

from dataclasses import replace

import pytest
import torch

from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.batch_building import build_batch
from engine.step.decode_buffers import DecodeBuffers
from engine.step.graph_capture import RepeatedCall
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from engine.step.speculative_steps import SpeculativeSteps
from engine.step.synthetic_acceptance import accept_by_rate, mean_length
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.decode_worker.one_rank import PAGE_TOKENS, load_model, make_cache
from tests.tiny_checkpoint import make_tiny_checkpoint

NUM_DRAFTS, NUM_PAGES = 3, 24
CPU = torch.device("cpu")
PROMPTS = [[(7 * n + 3 * j) % 250 + 5 for j in range(n)] for n in (1, 8, 21)]
PAGES = [[5, 3], [9, 1, 4], [8, 2, 7, 6]]
GREEDY = Sampling()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV3:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_nextn_predict_layers=1)
    return load_model(folder, "whole")


def chunk_of(tokens: list[int], start: int, pages: list[int], num_drafts: int = 0) -> SequenceChunk:
    rows = [
        SampleRow(sampling=GREEDY, position=start + len(tokens) - n) for n in range(num_drafts + 1)
    ]
    return SequenceChunk(
        token_ids=tokens,
        start=start,
        pages=pages,
        sample=rows[0],
        checks=tuple(reversed(rows[1:])),
    )


def steps_of(model: DeepseekV3, cache: torch.Tensor, sizes: tuple[int, ...]) -> SpeculativeSteps:
    steps = SpeculativeSteps(
        model,
        cache,
        most_drafts=NUM_DRAFTS,
        max_batch=5,
        max_rows=5 * (1 + NUM_DRAFTS),
        max_pages=6,
        sizes={count: sizes for count in range(NUM_DRAFTS + 1) if sizes},
        capture=RepeatedCall() if sizes else None,
    )
    steps.capture_all()
    return steps


@torch.inference_mode()
def foreseen(model: DeepseekV3, token_ids: list[int]) -> list[int]:
    """What the MTP layer drafts behind these tokens, by passes over all of them."""
    assert model.mtp is not None
    cache, number = make_cache(model, NUM_PAGES), len(token_ids) - 1
    pages = list(range(NUM_PAGES))
    options = {"page_tokens": PAGE_TOKENS, "form": AttentionForm.PLAIN, "device": CPU}
    chunk = SequenceChunk(token_ids=token_ids[:-1], start=0, pages=pages)
    batch = build_batch([chunk], tokens_per_rank=(number,), **options)
    states = model.hidden_states(batch, cache)
    shifted = replace(batch, token_ids=torch.tensor(token_ids[1:]))
    states = model.mtp.forward(shifted, states, cache[-1])[-1:]
    drafts: list[int] = []
    while True:
        drafts.append(int(model.mtp.logits(states).argmax()))
        if len(drafts) == NUM_DRAFTS:
            return drafts
        at = number + len(drafts) - 1
        chunk = SequenceChunk(token_ids=drafts[-1:], start=at, pages=pages)
        batch = build_batch([chunk], tokens_per_rank=(1,), **options)
        states = model.mtp.forward(batch, states, cache[-1])


@torch.inference_mode()
def continued(model: DeepseekV3, token_ids: list[int], count: int) -> list[int]:
    """By a whole pass for each token."""
    token_ids = [*token_ids]
    for _ in range(count):
        chunk = chunk_of(token_ids, 0, list(range(NUM_PAGES)))
        runner = Runner(model, make_cache(model, NUM_PAGES), AttentionForm.PLAIN)
        (token,) = runner.step([chunk], (len(token_ids),))
        assert token is not None
        token_ids.append(token.token_id)
    return token_ids


@pytest.mark.parametrize("sizes", [(), (1, 2, 5)])
def test_tokens_and_drafts_are_those_of_whole_passes(
    model: DeepseekV3, sizes: tuple[int, ...]
) -> None:
    cache = make_cache(model, NUM_PAGES)
    chunks = [chunk_of(ids, 0, pages) for ids, pages in zip(PROMPTS, PAGES, strict=True)]
    Runner(model, cache, AttentionForm.PLAIN).step(chunks, (sum(map(len, PROMPTS)),))
    steps = steps_of(model, cache, sizes)
    runner = Runner(model, cache, AttentionForm.ABSORBED, speculation=steps)
    truths = [continued(model, ids, 12) for ids in PROMPTS]
    ends = [len(ids) + 1 for ids in PROMPTS]  # prefill has sampled one
    chunks = [
        chunk_of(truth[end - 2 : end], end - 2, pages)
        for truth, end, pages in zip(truths, ends, PAGES, strict=True)
    ]
    num_right = [0, 0, 0]
    counts = (NUM_DRAFTS, 2, 0, 1, NUM_DRAFTS)
    for step, (count, following) in enumerate(zip(counts, (*counts[1:], 0), strict=True)):
        pending = runner.begin(chunks, (3, 4), count)  # another rank has more
        tokens, made = iter(pending.result()), pending.drafts()
        assert made is not None
        for row, truth in enumerate(truths):
            sampled = [next(tokens) for _ in chunks[row].samples][: num_right[row] + 1]
            begin, ends[row] = ends[row], ends[row] + num_right[row] + 1
            got = [token.token_id for token in sampled if token is not None]
            assert got == truth[begin : ends[row]]
            assert made[row] == foreseen(model, truth[: ends[row]])[:count]
        num_right = [min(following, (step + row) % NUM_DRAFTS) for row in range(3)]
        chunks = [
            chunk_of(
                [*truth[end - 1 : end + right], (truth[end + right] + 1) % 250, 5, 5, 5][
                    : following + 1
                ],
                end - 1, pages, following,
            )
            for truth, end, pages, right in zip(truths, ends, PAGES, num_right, strict=True)
        ]  # fmt: skip
    assert runner.begin([], (0, 1), NUM_DRAFTS).result() == []


def test_rows_of_a_request_lie_beside_each_other() -> None:
    buffers = DecodeBuffers(max_rows=6, max_pages=4, page_tokens=8, device=CPU)
    fresh, other = (
        SequenceChunk(
            token_ids=[7, 8], start=7, pages=[5, 3], sample=SampleRow(sampling=GREEDY, position=9)
        ),
        chunk_of([9, 4, 6], 14, [1, 2, 6], 2),
    )
    batch = buffers.fill([fresh, other], 2, 3)
    assert batch.token_ids.tolist() == [7, 8, 0, 9, 4, 6]
    assert batch.positions.tolist() == [7, 8, 0, 14, 15, 16]
    assert batch.kv_lengths.tolist() == [8, 9, 0, 15, 16, 17]
    # The first token's KV is there.
    assert batch.slots.tolist() == [-1, 24, -1, 22, 23, 48]
    assert batch.block_table.tolist() == [[5, 3, 0, 0]] * 3 + [[1, 2, 6, 0]] * 3


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_made_up_acceptance_has_its_length(num_drafts: int) -> None:
    chunks = [chunk_of([5] * (num_drafts + 1), start, [], num_drafts) for start in range(4000)]
    told = torch.arange(4000 * (num_drafts + 1)) % 9  # some are right without being meant to
    rows = accept_by_rate(told, chunks, vocab_size=300).view(4000, num_drafts + 1)
    lengths = 1 + (rows[:, :-1] == 5).long().cumprod(1).sum(1)
    assert lengths.double().mean() == pytest.approx(mean_length(num_drafts), abs=0.03)
    assert torch.equal(accept_by_rate(told, chunks, 300).view_as(rows), rows)
