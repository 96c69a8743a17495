"""Runs pieces of requests through the model: builds the batch, samples where asked to.

tokens = runner.step(pieces, tokens_per_rank)          # waits

first = runner.begin(pieces, tokens_per_rank)          # does not wait for the device
piece = Piece(token_ids=UNKNOWN, follows=PendingToken(first, row), ...)
second = runner.begin([piece], tokens_per_rank)        # the token never passes through the host
tokens = first.result()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from engine.cpu_threads import CpuThreads
from engine.drawn import Drawn
from engine.messages import TokenOut
from engine.pending_step import PendingStep, PendingToken
from engine.prompt_scores import PromptScores
from engine.sampler import SampleRow, draw
from engine.step_thread import StepThread
from engine.upload import upload
from model.batch import AttentionForm, ForwardBatch
from model.deepseek import DeepseekV3

OnLayer = Callable[[int], None]
UNKNOWN = (0,)  # `Piece.token_ids` of a token that the host does not know yet
Buffer = TypeVar("Buffer", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one request.

    token_ids  the tokens to compute, at least one
    start      position of the first of them; the KV of all before it is in the pages already
    pages      page ids in token order, at least up to the last of these tokens; read during
               the call only, so that a live list may be passed
    sample     how to sample the token behind the last one; None: not wanted
    scores     where log-probabilities of the prompt that this is a piece of are gathered; None:
               not wanted
    follows    the step under way that samples its only token; None: `token_ids` says them
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SampleRow | None = None
    scores: PromptScores | None = None
    follows: PendingToken | None = None

    @property
    def num_rows(self) -> int:
        """How many of its last tokens need logits."""
        return len(self.token_ids) if self.scores is not None else int(self.sample is not None)


class Graphs(Protocol):
    """Recorded steps of one token a piece, as `engine.decode_graphs.DecodeGraphs`."""

    def padded_size(self, tokens_per_rank: Sequence[int]) -> int | None:
        """The same on all ranks; None when there is no graph for so many."""

    def run(
        self,
        pieces: Sequence[Piece],
        size: int,
        patch: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """[len(pieces), V] float32, overwritten by the next run. `patch` may change the token ids
        [size] int64 on the device in front of the step."""


class Runner:
    """`kv_cache` [L, pages, page_tokens, kv_dim] on the model's device; without `threads` the
    thread count is left alone. `graphs` are for batches in which every piece is one token that
    is followed by a sampled one.

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
        in_background: bool = False,
    ) -> None:
        self._model = model
        self._threads = threads
        self._kv_cache = kv_cache
        self._form = form
        self._page_tokens = kv_cache.shape[2]
        self._graphs = graphs
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
        pieces: Sequence[Piece],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None = None,
    ) -> list[TokenOut | None]:
        """One forward pass of this rank; one result a piece, None where none was wanted.

        `tokens_per_rank` are the token counts of all ranks of the EP group in this step; a
        rank without pieces takes part. `on_layer(l)` as in `DeepseekV3.forward`.
        """
        pending = PendingStep([piece.sample is not None for piece in pieces])
        pending.settle(self._compute(pieces, tokens_per_rank, on_layer))
        return pending.result()

    def begin(self, pieces: Sequence[Piece], tokens_per_rank: tuple[int, ...]) -> PendingStep:
        """As `step`, which must not be called before this one is over. Page lists may change once
        this has returned; samples are looked at until the step is over."""
        pending = PendingStep([piece.sample is not None for piece in pieces])
        if self._thread is None:
            pending.settle(self._compute(pieces, tokens_per_rank, None))
            return pending
        batch = self._batch(pieces, tokens_per_rank)

        def compute() -> None:
            try:
                pending.settle(self._compute(pieces, tokens_per_rank, None, batch))
            except BaseException as error:  # noqa: BLE001 - raised to whoever waits
                pending.fail(error)

        self._thread.submit(compute)
        return pending

    @torch.inference_mode()
    def forward(
        self,
        pieces: Sequence[Piece],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """[S, V] float32 logits behind the last token of each piece that is to be sampled."""
        batch = self._batch(pieces, tokens_per_rank)
        return self._logits(pieces, batch, on_layer)

    @torch.inference_mode()
    def _compute(
        self,
        pieces: Sequence[Piece],
        tokens_per_rank: tuple[int, ...],
        on_layer: OnLayer | None,
        batch: ForwardBatch | None = None,
    ) -> Drawn:
        """`batch` is of these pieces; None: to be built, where one is needed."""
        size = self._graph_size(pieces, tokens_per_rank)
        if size is not None:
            assert self._graphs is not None
            logits = self._graphs.run(pieces, size, lambda ids: _fill_in(ids, pieces))
        else:
            batch = batch or self._batch(pieces, tokens_per_rank)
            logits = self._logits(pieces, batch, on_layer)
        return draw(logits, [piece.sample for piece in pieces if piece.sample is not None])

    def _graph_size(self, pieces: Sequence[Piece], tokens_per_rank: tuple[int, ...]) -> int | None:
        """None: no graph. All ranks come to the same conclusion."""
        if self._graphs is None:
            return None
        assert all(len(one.token_ids) == one.num_rows == 1 for one in pieces), "not a decode step"
        return self._graphs.padded_size(tokens_per_rank)

    def _logits(
        self, pieces: Sequence[Piece], batch: ForwardBatch, on_layer: OnLayer | None
    ) -> torch.Tensor:
        if self._threads is not None:
            self._threads.prepare(len(batch.token_ids))
        _fill_in(batch.token_ids, pieces)
        if any(piece.scores is not None for piece in pieces):
            return self._score(pieces, batch, on_layer)
        return self._model.forward(batch, self._kv_cache, on_layer)

    def _score(
        self, pieces: Sequence[Piece], batch: ForwardBatch, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """Fills the scores of pieces that have some, a slice of logits at a time."""
        hidden = self._model.hidden_rows(batch, self._kv_cache, on_layer)
        sampled, begin = [], 0
        for piece in pieces:
            end = begin + piece.num_rows
            if piece.scores is not None:
                piece.scores.add(piece.start, hidden[begin:end], self._model.logits)
            if piece.sample is not None:
                sampled.append(end - 1)
            begin = end
        return self._model.logits(hidden[sampled])

    def _batch(self, pieces: Sequence[Piece], tokens_per_rank: tuple[int, ...]) -> ForwardBatch:
        return build_batch(
            pieces,
            page_tokens=self._page_tokens,
            form=self._form,
            tokens_per_rank=tokens_per_rank,
            device=self._kv_cache.device,
        )


def _fill_in(token_ids: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Writes the tokens that a step under way samples into `token_ids` [T], on the device."""
    followers = [(row, piece.follows) for row, piece in enumerate(pieces) if piece.follows]
    if not followers:
        return
    assert all(len(piece.token_ids) == 1 for piece in pieces), "only steps of single tokens follow"
    step = followers[0][1].step
    assert all(follows.step is step for _, follows in followers), "two steps are followed"
    places = np.array([(row, follows.row) for row, follows in followers]).T.copy()
    rows, sources = upload(places, token_ids.device)
    token_ids.index_copy_(0, rows, step.token_ids.index_select(0, sources))


def build_batch(
    pieces: Sequence[Piece],
    *,
    page_tokens: int,
    form: AttentionForm,
    tokens_per_rank: tuple[int, ...],
    device: torch.device,
) -> ForwardBatch:
    """All tensors of the batch are views of one buffer: one allocation, one copy to the device."""
    counts = np.array([len(piece.token_ids) for piece in pieces], dtype=np.int64)
    starts = np.array([piece.start for piece in pieces], dtype=np.int64)
    num_pages = -(-(starts + counts) // page_tokens)
    num_rows, num_tokens, width = len(pieces), int(counts.sum()), int(num_pages.max(initial=0))
    num_logits = np.array([piece.num_rows for piece in pieces], dtype=np.int64)
    sizes = (
        *(num_tokens, num_tokens, num_tokens, int(num_logits.sum())),
        *(num_rows + 1, num_rows, num_rows * width),
    )
    buffer = np.zeros(_num_longs(sizes), dtype=np.int64)
    host = _views(buffer, sizes, np.int32)
    token_ids, positions, slots, logit_rows, query_start, kv_lengths, block_table = host
    blocks = block_table.reshape(num_rows, width)
    np.cumsum(counts, out=query_start[1:])
    kv_lengths[:] = starts + counts
    for row, piece in enumerate(pieces):
        assert piece.token_ids, "an empty piece"
        token_ids[query_start[row] : query_start[row + 1]] = piece.token_ids
        blocks[row, : num_pages[row]] = piece.pages[: num_pages[row]]
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
        query_start=parts[4],
        kv_lengths=parts[5],
        block_table=parts[6].reshape(num_rows, width),
        form=form,
        tokens_per_rank=tokens_per_rank,
    )


NUM_INT64_PARTS = 4  # in front; the parts behind them are int32


def _num_longs(sizes: Sequence[int]) -> int:
    """Length of the int64 buffer; every int32 part begins on an int64 boundary."""
    return sum(sizes[:NUM_INT64_PARTS]) + sum((size + 1) // 2 for size in sizes[NUM_INT64_PARTS:])


def _views(buffer: Buffer, sizes: Sequence[int], int32: Any) -> list[Buffer]:  # noqa: ANN401
    """The parts of a buffer, of numpy or torch alike; `int32` is the library's own dtype."""
    parts, begin = [], 0
    for index, size in enumerate(sizes):
        if index < NUM_INT64_PARTS:
            end = begin + size
            parts.append(buffer[begin:end])
        else:
            end = begin + (size + 1) // 2
            parts.append(buffer[begin:end].view(int32)[:size])
        begin = end
    return parts
