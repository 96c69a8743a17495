"""Runs pieces of requests through the model: builds the batch, samples where asked to.

tokens = runner.step(pieces, tokens_per_rank)          # waits

first = runner.begin(pieces, tokens_per_rank)          # does not wait for the device
piece = SequenceChunk(token_ids=UNKNOWN, follows=PendingToken(first, row), ...)
second = runner.begin([piece], tokens_per_rank)        # the token never passes through the host
tokens = first.result()
second.sample()                                        # histories know these tokens by now
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engine.link.messages import TokenOut
from engine.sampling.sampled_batch import SampledBatch
from engine.sampling.sampler import draw
from engine.step.batch_building import build_batch
from engine.step.cpu_threads import CpuThreads
from engine.step.pending_step import PendingStep
from engine.step.sequence_chunk import SequenceChunk
from engine.step.speculative_steps import SpeculativeSteps
from engine.step.step_thread import StepThread
from kernels.build.upload import upload
from model.batch import AttentionForm, ForwardBatch
from model.deepseek import DeepseekV3

OnLayer = Callable[[int], None]


class Graphs(Protocol):
    """Recorded steps of one token a piece, as `engine.step.decode_graphs.DecodeGraphs`."""

    def padded_size(self, tokens_per_rank: Sequence[int]) -> int | None:
        """The same on all ranks; None when there is no graph for so many."""

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        size: int,
        patch: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """[len(pieces), V] float32, overwritten by the next run. `patch` may change the token ids
        [size] int64 on the device before the step."""


class RecordedPasses(Protocol):
    """As `engine.step.prefill_graphs.PrefillGraphs`."""

    def fits(self, batch: ForwardBatch) -> bool: ...

    def hidden_rows(self, batch: ForwardBatch, on_layer: OnLayer | None = None) -> torch.Tensor: ...


class Runner:
    """`kv_cache` [L, pages, page_tokens, kv_dim] on the model's device; without `threads` the
    thread count is left alone. `graphs` are for batches in which every piece is one token that
    is followed by a sampled one, `passes` for whatever fits into one of them. `speculation`: steps
    that are begun end in drafts; `tokens_per_rank` are pieces of each rank there.

    `in_background`: steps that are begun are computed in a thread. That is for the CPU; on a GPU
    whoever begins a step enqueues it. Steps are computed in the order in which they are begun.
    """

    def __init__(
        self,
        model: DeepseekV3,
        kv_cache: torch.Tensor,
        form: AttentionForm,
        threads: CpuThreads | None = None,
        *,
        graphs: Graphs | None = None,
        passes: RecordedPasses | None = None,
        speculation: SpeculativeSteps | None = None,
        in_background: bool = False,
    ) -> None:
        self._model = model
        self._threads = threads
        self._kv_cache = kv_cache
        self._form = form
        self._page_tokens = kv_cache.shape[2]
        self._graphs = graphs
        self._passes = passes
        self._speculation = speculation
        self._thread = StepThread() if in_background else None

    @property
    def runs_ahead(self) -> bool:
        """Whether `begin` returns before the step is computed."""
        return self._thread is not None or self._graphs is not None

    def close(self) -> None:
        """Waits for what has begun."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def step(
        self,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None = None,
        meanwhile: Callable[[], object] | None = None,
        *,
        rows_per_rank: tuple[int, ...] | None = None,
    ) -> list[TokenOut | None]:
        """One forward pass of this rank; one result a piece, None where none was wanted.

        `tokens_per_rank` are the token counts of all ranks of the EP group in this step, and
        `rows_per_rank` those of their pieces' `num_rows`, which several ranks may leave out all
        together; a rank without pieces takes part. `on_layer(l)` as in `DeepseekV3.forward`;
        `meanwhile` is called once all is enqueued, before waiting for the device.
        """
        logits = self._run(chunks, tokens_per_rank, on_layer, rows_per_rank=rows_per_rank)
        sampled = _draw(logits, chunks)
        if meanwhile is not None:
            meanwhile()
        tokens = iter(sampled.tokens())
        return [None if chunk.sample is None else next(tokens) for chunk in chunks]

    def begin(
        self,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        num_drafts: int = 0,
    ) -> PendingStep:
        """As `step`, which must not be called before this one is over. Page lists may change once
        this has returned; samples are looked at until the step is over. Tokens are sampled at
        once, unless that depends on some that are in flight: see `PendingStep.sample`.
        `num_drafts` as in `SpeculativeSteps.verify`."""
        is_sampled = [row is not None for chunk in chunks for row in (*chunk.checks, chunk.sample)]
        pending = PendingStep(is_sampled, self._perform, self._kv_cache.is_cuda)
        if self._speculation is not None:
            verify = partial(self._verify, self._speculation, chunks, tokens_per_rank, num_drafts)
            pending.begin(verify, partial(self._speculation.choose, chunks=chunks))
        else:
            batch = self._batch(chunks, tokens_per_rank) if self._thread is not None else None
            compute = partial(self._run, chunks, tokens_per_rank, None, batch)
            pending.begin(compute, partial(_draw, chunks=chunks))
        if not any(chunk.waits_for_history for chunk in chunks):
            pending.sample()
        return pending

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None = None,
        *,
        rows_per_rank: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """[S, V] float32 logits after the last token of each piece that is to be sampled;
        arguments as for `step`."""
        batch = self._batch(chunks, tokens_per_rank, rows_per_rank)
        return self._logits(chunks, batch, on_layer)

    def _verify(
        self,
        steps: SpeculativeSteps,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        num_drafts: int,
    ) -> torch.Tensor:
        if self._threads is not None:
            self._threads.prepare(sum(len(chunk.token_ids) for chunk in chunks))
        return steps.verify(chunks, tokens_per_rank, num_drafts)

    def _perform(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            job()
        else:
            self._thread.submit(job)

    @torch.inference_mode()
    def _run(
        self,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None,
        batch: ForwardBatch | None = None,
        *,
        rows_per_rank: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Logits as `forward`, valid until the next step. `batch` is of these pieces; None: to be
        built, where one is needed."""
        size = self._graph_size(chunks, tokens_per_rank)
        if size is not None:
            assert self._graphs is not None
            return self._graphs.run(chunks, size, lambda ids: _fill_in(ids, chunks))
        batch = batch or self._batch(chunks, tokens_per_rank, rows_per_rank)
        return self._logits(chunks, batch, on_layer)

    def _graph_size(
        self, chunks: Sequence[SequenceChunk], tokens_per_rank: tuple[int, ...]
    ) -> int | None:
        """None: no graph. All ranks come to the same conclusion."""
        if self._graphs is None:
            return None
        assert all(len(one.token_ids) == one.num_rows == 1 for one in chunks), "not a decode step"
        return self._graphs.padded_size(tokens_per_rank)

    def _logits(
        self, chunks: Sequence[SequenceChunk], batch: ForwardBatch, on_layer: OnLayer | None
    ) -> torch.Tensor:
        if self._threads is not None:
            self._threads.prepare(len(batch.token_ids))
        _fill_in(batch.token_ids, chunks)
        if any(chunk.scores is not None for chunk in chunks):
            return self._score(chunks, batch, on_layer)
        if self._passes is not None and self._passes.fits(batch):
            return self._model.logits(self._passes.hidden_rows(batch, on_layer))
        return self._model.forward(batch, self._kv_cache, on_layer)

    def _score(
        self, chunks: Sequence[SequenceChunk], batch: ForwardBatch, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """Fills the scores of pieces that have some, a slice of logits at a time."""
        if self._passes is not None and self._passes.fits(batch):
            hidden = self._passes.hidden_rows(batch, on_layer)
        else:
            hidden = self._model.hidden_rows(batch, self._kv_cache, on_layer)
        sampled, begin = [], 0
        for chunk in chunks:
            end = begin + chunk.num_rows
            if chunk.scores is not None:
                chunk.scores.add(chunk.start, hidden[begin:end], self._model.logits)
            if chunk.sample is not None:
                sampled.append(end - 1)
            begin = end
        return self._model.logits(hidden[sampled])

    def _batch(
        self,
        chunks: Sequence[SequenceChunk],
        tokens_per_rank: tuple[int, ...],
        rows_per_rank: tuple[int, ...] | None = None,
    ) -> ForwardBatch:
        return build_batch(
            chunks,
            page_tokens=self._page_tokens,
            form=self._form,
            tokens_per_rank=tokens_per_rank,
            rows_per_rank=rows_per_rank,
            device=self._kv_cache.device,
        )


@torch.inference_mode()
def _draw(logits: torch.Tensor, chunks: Sequence[SequenceChunk]) -> SampledBatch:
    return draw(logits, [chunk.sample for chunk in chunks if chunk.sample is not None])


def _fill_in(token_ids: torch.Tensor, chunks: Sequence[SequenceChunk]) -> None:
    """Writes the tokens that a step under way samples into `token_ids` [T], on the device."""
    followers = [(row, chunk.follows) for row, chunk in enumerate(chunks) if chunk.follows]
    if not followers:
        return
    assert all(len(chunk.token_ids) == 1 for chunk in chunks), "only steps of single tokens follow"
    step = followers[0][1].step
    assert all(follows.step is step for _, follows in followers), "two steps are followed"
    places = np.array([(row, follows.row) for row, follows in followers]).T.copy()
    rows, sources = upload(places, token_ids.device)
    token_ids.index_copy_(0, rows, step.token_ids.index_select(0, sources))
