"""Decode steps with drafts: the model verifies those that there are, its MTP layer makes the next.

    steps = SpeculativeSteps(model, kv_cache, sizes={3: (1, 2, 4)}, max_batch=64, ...)
    steps.capture_all()                                 # where steps are recorded
    logits = steps.verify(chunks, chunks_per_rank, 3)   # [S, V] of the chunks' samples
    sampled = steps.choose(logits, chunks=chunks)       # and drafts behind what is right of them

In a step with K drafts a request has K + 1 rows of one token each: its last token and its drafts,
whose KV is written before attention, so that each row sees those before it. What is sampled after a
row decides whether the draft in the next row is right; KV of wrong ones is overwritten by later
steps.

The MTP layer then goes over the same rows, with their states and the tokens after them, and from
the last right one on K - 1 times over what it has just drafted. All of that is for the device alone
to know; all ranks do it, with as many rows. Without drafts it writes its KV, for those to come. A
model without the layer only verifies.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.sampling.sampled_batch import SampledBatch
from engine.sampling.sampler import draw
from engine.step.decode_buffers import DecodeBuffers
from engine.step.graph_capture import Capture, Step, capture_sizes
from engine.step.sequence_chunk import SequenceChunk
from engine.step.synthetic_acceptance import accept_by_rate
from kernels.build.upload import upload_all
from model.batch import DecodeBatch
from model.deepseek import DeepseekV3


class SpeculativeSteps:
    """`kv_cache` [L, pages, page_tokens, kv_dim], the MTP layer's last, where there is one; `sizes`
    of requests, rising, by the number of drafts, are recorded by `capture`; up to `max_batch`
    requests, of `max_rows` together, can be computed; `max_pages` as in `DecodeBuffers`.
    `synthetic`: which drafts are right is made up."""

    def __init__(
        self,
        model: DeepseekV3,
        kv_cache: torch.Tensor,
        *,
        most_drafts: int,
        max_batch: int,
        max_rows: int,
        max_pages: int,
        sizes: Mapping[int, Sequence[int]],
        capture: Capture | None = None,
        synthetic: bool = False,
    ) -> None:
        self._model, self._mtp = model, model.mtp
        self._kv_cache = kv_cache
        self._page_tokens = kv_cache.shape[2]
        self._sizes = sizes
        self._capture = capture
        self._synthetic = synthetic
        device = kv_cache.device
        self._buffers = DecodeBuffers(
            max_rows=max_rows, max_pages=max_pages, page_tokens=self._page_tokens, device=device
        )
        vocab_size, hidden = model.config.vocab_size, model.config.hidden_size
        # Of all sizes, as they are recorded: see `DecodeGraphs`.
        self._logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=device)
        self._states = torch.zeros(max_rows, hidden, dtype=kv_cache.dtype, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._rooms = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(max_batch, most_drafts, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, int], tuple[Step, ...]] = {}
        # Of the step under way; and which of its rows are sampled after.
        self._size = self._num_drafts = 0
        self._rows = self._sampled[:0]

    @property
    def num_bytes(self) -> int:
        """Of the device, once all is recorded."""
        own = (self._logits, self._states, self._sampled, self._rooms, self._drafts)
        recorded = 0 if self._capture is None else self._capture.num_bytes()
        return self._buffers.num_bytes + sum(each.nbytes for each in own) + recorded

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Records all sizes. To be called on all ranks of the group at once."""
        if self._capture is None:
            return
        for num_drafts in sorted(self._sizes, reverse=True):
            what, sizes = f"decode step of {num_drafts} drafts", self._sizes[num_drafts]
            capture_sizes(what, sizes, partial(self._record, num_drafts), self._capture)

    def _record(self, num_drafts: int, size: int) -> None:
        assert self._capture is not None
        self._buffers.fill((), size, num_drafts + 1)
        steps = self._steps(size, num_drafts)
        self._replays[size, num_drafts] = tuple(map(self._capture, steps))

    @torch.inference_mode()
    def verify(
        self, chunks: Sequence[SequenceChunk], chunks_per_rank: Sequence[int], num_drafts: int
    ) -> torch.Tensor:
        """[S, V] float32, valid until the next step. `num_drafts` are those of a request at most,
        and those that are made; the same on all ranks."""
        width = num_drafts + 1
        size = self._padded_size(max(chunks_per_rank), num_drafts)
        self._buffers.fill(chunks, size, width)
        rooms = np.zeros(size, dtype=np.int64)
        rooms[: len(chunks)] = [len(chunk.pages) * self._page_tokens for chunk in chunks]
        rows = [
            index * width + row
            for index, chunk in enumerate(chunks)
            for row in range(chunk.num_seen, len(chunk.token_ids))
        ]
        given = upload_all((rooms, np.array(rows, dtype=np.int64)), self._kv_cache.device)
        self._rooms[:size].copy_(given[0])
        self._size, self._num_drafts, self._rows = size, num_drafts, given[1]
        self._steps(size, num_drafts)[0]()
        logits = self._logits[: size * width]
        return logits if len(rows) == len(logits) else logits.index_select(0, self._rows)

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, *, chunks: Sequence[SequenceChunk]) -> SampledBatch:
        """Of what `verify` gave last. On a GPU all of it is enqueued only."""
        change = None
        if self._synthetic:
            vocab_size = self._model.config.vocab_size
            change = partial(accept_by_rate, chunks=chunks, vocab_size=vocab_size)
        sampled = draw(logits, [row for chunk in chunks for row in chunk.samples], change)
        self._sampled.index_copy_(0, self._rows, sampled.token_ids)
        if self._mtp is None:
            return sampled
        self._steps(self._size, self._num_drafts)[1]()
        return sampled.with_drafts(self._drafts[: len(chunks), : self._num_drafts])

    @torch.inference_mode()
    def replay(self, size: int) -> None:
        """What the device does of the last step, which had so many requests, once more."""
        for step in self._steps(size, self._num_drafts):
            step()

    def _padded_size(self, most: int, num_drafts: int) -> int:
        """The same on all ranks; what is too large to be recorded is computed as it is."""
        sizes = self._sizes.get(num_drafts, ())
        index = bisect_left(sizes, most)
        return sizes[index] if index < len(sizes) else most

    def _steps(self, size: int, num_drafts: int) -> tuple[Step, ...]:
        """That verifies, and that drafts, where there is one."""
        steps = (self._verify,) if self._mtp is None else (self._verify, self._draft)
        plain = tuple(partial(step, size, num_drafts + 1) for step in steps)
        return self._replays.get((size, num_drafts), plain)

    def _verify(self, size: int, width: int) -> None:
        rows = slice(size * width)
        batch, out, states = (
            self._buffers.batch(size, width),
            self._logits[rows],
            self._states[rows],
        )
        self._model.decode(batch, self._kv_cache, out, states)

    def _draft(self, size: int, width: int) -> None:
        """Drafts from the states and tokens of the rows."""
        assert self._mtp is not None
        batch, cache = self._buffers.batch(size, width), self._kv_cache[-1]
        last, following = self._last_right(batch, size, width)
        batch = replace(batch, token_ids=following.flatten(), slots=self._slots(batch))
        states = self._mtp.decode(batch, self._states[: size * width], cache)
        first = torch.arange(0, size * width, width, device=last.device)
        states, end = states.index_select(0, first + last), batch.positions[first + last]
        is_real, table = batch.kv_lengths[first] > 0, batch.block_table[first]
        for index in range(width - 1):
            token_ids = self._mtp.logits(states).argmax(-1)
            self._drafts[:size, index] = token_ids
            if index == width - 2:
                return
            position = end + index + 1
            is_written = is_real & (position < self._rooms[:size])
            position = torch.where(is_written, position, 0)
            row = DecodeBatch(
                token_ids=token_ids,
                positions=position,
                kv_lengths=torch.where(is_written, position + 1, 0).to(torch.int32),
                block_table=table,
                slots=position,
            )
            states = self._mtp.decode(replace(row, slots=self._slots(row)), states, cache)

    def _last_right(
        self, batch: DecodeBatch, size: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[size], the last row of each request that is right, and [size, K + 1] the token after
        each row: of wrong ones, any."""
        told, sampled, slots, lengths = (
            each[: size * width].view(size, width)
            for each in (batch.token_ids, self._sampled, batch.slots, batch.kv_lengths)
        )
        is_known = slots[:, :-1] < 0  # by its KV being there: the next token is no draft
        is_right = (lengths[:, 1:] > 0) & (is_known | (told[:, 1:] == sampled[:, :-1]))
        following = torch.where(is_known, told[:, 1:], sampled[:, :-1])
        return is_right.cumprod(1).sum(1), torch.cat((following, sampled[:, -1:]), dim=1)

    def _slots(self, batch: DecodeBatch) -> torch.Tensor:
        """Of all rows that are no padding: the MTP layer writes also where the model has written
        before."""
        page = (batch.positions // self._page_tokens).unsqueeze(1)
        slots = batch.block_table.gather(1, page).squeeze(1).to(torch.int64) * self._page_tokens
        return torch.where(batch.kv_lengths > 0, slots + batch.positions % self._page_tokens, -1)
