"""Runs every kernel that a rank will need once, so that what is compiled or allocated lazily is
there before the rank says `Ready`.

    warm_up(model, kv_cache, form, longest=2048, num_ranks=4, on_gpu=True)

Layers of one kind have the same shapes: on a GPU a dense one and two with experts stand for all,
the last of which goes on with the rows that are sampled only. Passes of 1, 2, 4, ... tokens stand
for all lengths, of 1, 2, 4, ... prompts for all batches, since kernels are chosen by powers of two;
those that are not were compiled before (`compile_ahead`). What is compiled stays on disk
(Triton's cache, DeepGEMM's), so that the next start finds it. A CPU compiles nothing: one token
through the whole model there. The passes write to pages that no request owns yet.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from core.log import get_logger
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from model.attention.plan import WANTED_SHARE
from model.batch import AttentionForm
from model.deepseek import DeepseekV3

log = get_logger("engine.warm_up")


def warm_up(
    model: DeepseekV3,
    kv_cache: torch.Tensor,
    form: AttentionForm,
    *,
    longest: int,
    num_ranks: int,
    on_gpu: bool,
) -> None:
    """`longest` is the largest number of tokens of a pass. To be called on all ranks at once."""
    whole = Runner(model, kv_cache, form)
    pages = range(kv_cache.shape[1])
    whole.step([_chunk(1, pages)], (1,) * num_ranks)
    if not on_gpu:
        return
    short, first = short_model(model), representatives(model)[0]
    room = kv_cache.shape[1] * kv_cache.shape[2]
    pass_lengths(
        short,
        kv_cache[first : first + short.num_kv_layers],
        form,
        list(lengths_up_to(min(longest, room))),
        num_ranks,
    )


def pass_lengths(
    short: DeepseekV3,
    kv_cache: torch.Tensor,
    form: AttentionForm,
    lengths: Sequence[int],
    num_ranks: int,
) -> None:
    """Passes of up to so many tokens on every rank; `kv_cache` of the layers of `short`."""
    runner = Runner(short, kv_cache, form)
    began = time.monotonic()
    for chunks in batches(form, lengths, range(kv_cache.shape[1])):
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        # As ranks of each kind do it: those that prefill tell each other how many they sample.
        rows_per_rank = (len(chunks),) * num_ranks if form is AttentionForm.PLAIN else None
        runner.step(chunks, (num_tokens,) * num_ranks, rows_per_rank=rows_per_rank)
        seconds = round(time.monotonic() - began, 1)
        log.info("warmed up", tokens=num_tokens, prompts=len(chunks), seconds=seconds)


def batches(
    form: AttentionForm, lengths: Sequence[int], pages: Sequence[int]
) -> Iterator[list[SequenceChunk]]:
    """One of each of `lengths` tokens, all of them in the same pages. To prefill: a prompt each,
    then several prompts, and then the last tokens of several, whose others are in the cache."""
    if form is AttentionForm.ABSORBED:
        for length in lengths:
            yield [_chunk(1, pages)] * length
        return
    for length in lengths:
        yield [_chunk(length, pages)]
    for count in lengths_up_to(max(1, max(lengths) // WANTED_SHARE)):
        yield [_chunk(WANTED_SHARE, pages)] * count
        yield [_chunk(1, pages, start=WANTED_SHARE)] * count


def short_model(model: DeepseekV3) -> DeepseekV3:
    """Of the layers that stand for all, and an MTP layer."""
    return replace(model, layers=tuple(model.layers[layer] for layer in representatives(model)))


def representatives(model: DeepseekV3) -> list[int]:
    """The last dense layer and the first two with experts after it, or as many of these as there
    are."""
    num_dense = min(model.config.num_dense_layers, model.config.num_layers)
    layers = range(num_dense - 1, num_dense + 2)
    return [layer for layer in layers if 0 <= layer < model.config.num_layers]


def lengths_up_to(longest: int) -> Iterator[int]:
    """1, 2, 4, ... and `longest` itself."""
    length = 1
    while length < longest:
        yield length
        length *= 2
    yield longest


def _chunk(num_tokens: int, pages: Sequence[int], start: int = 0) -> SequenceChunk:
    sampling = Sampling(temperature=1.0, logprobs=True, top_logprobs=1)  # the most that is done
    row = SampleRow(sampling=sampling, position=start + num_tokens)
    return SequenceChunk(token_ids=[0] * num_tokens, start=start, pages=pages, sample=row)
