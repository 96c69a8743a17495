"""Decode steps of fixed sizes, recorded once: the host launches one graph in place of a thousand
kernels.

    graphs = DecodeGraphs(model.decode, kv_cache, sizes=..., max_pages=..., vocab_size=..., ...)
    graphs.capture_all()
    size = graphs.padded_size(tokens_per_rank)       # the same on all ranks; None: too many
    if size is not None:
        logits = graphs.run(pieces, size)            # [len(pieces), V], valid until the next run

The largest batch of all ranks decides the size, so that all ranks replay the same graph; a rank
with nothing to do replays it with padding only.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.step.decode_buffers import DecodeBuffers, DecodeRow
from engine.step.graph_capture import Capture, Step, capture_sizes
from model.batch import DecodeBatch

Decode = Callable[[DecodeBatch, torch.Tensor, torch.Tensor], torch.Tensor]
SMALL_SIZES = (1, 2, 4)
STRIDE = 8


class DecodeGraphs:
    """`decode` is `DeepseekV3.decode`; `kv_cache` [L, pages, page_tokens, kv_dim]; `sizes` rising;
    `max_pages` as in `DecodeBuffers`."""

    def __init__(
        self,
        decode: Decode,
        kv_cache: torch.Tensor,
        *,
        sizes: Sequence[int],
        max_pages: int,
        vocab_size: int,
        capture: Capture,
    ) -> None:
        assert sizes, "no sizes"
        assert list(sizes) == sorted(set(sizes)), sizes
        self.sizes = tuple(sizes)
        self._decode = decode
        self._kv_cache = kv_cache
        self._capture = capture
        device = kv_cache.device
        self._buffers = DecodeBuffers(
            max_rows=self.sizes[-1],
            max_pages=max_pages,
            page_tokens=kv_cache.shape[2],
            device=device,
        )
        # Of all sizes: graphs share their memory, so each leaves its result here.
        self._logits = torch.zeros(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._replays: dict[int, Step] = {}

    @property
    def num_bytes(self) -> int:
        """Of the device, once all is recorded."""
        return self._buffers.num_bytes + self._logits.nbytes + self._capture.num_bytes()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Records all sizes. To be called on all ranks of the group at once."""
        capture_sizes("decode step", self.sizes, self._record, self._capture)

    def _record(self, size: int) -> None:
        self._buffers.fill((), size)
        self._replays[size] = self._capture(partial(self._step, size))

    def padded_size(self, tokens_per_rank: Sequence[int]) -> int | None:
        """The smallest size that holds every rank's batch; None when there is none."""
        index = bisect_left(self.sizes, max(tokens_per_rank))
        return self.sizes[index] if index < len(self.sizes) else None

    @torch.inference_mode()
    def run(
        self,
        pieces: Sequence[DecodeRow],
        size: int,
        patch: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """One step; logits [len(pieces), V] float32, overwritten by the next run. Pieces have one
        token each. `patch` gets token_ids [size] int64 on the device, in front of the step, to
        put in tokens that the host does not know yet."""
        batch = self._buffers.fill(pieces, size)
        if patch is not None:
            patch(batch.token_ids)
        self._replays[size]()
        return self._logits[: len(pieces)]

    @torch.inference_mode()
    def replay(self, size: int) -> None:
        """The last step of this size once more, if no other size came between."""
        self._replays[size]()

    def _step(self, size: int) -> None:
        self._decode(self._buffers.batch(size), self._kv_cache, self._logits[:size])


def graph_sizes(told: Sequence[int], max_batch: int) -> tuple[int, ...]:
    """The sizes to capture, rising: those told, or 1, 2, 4, 8, 16, 24, ... and `max_batch`
    itself; none above it."""
    sizes = {*told} if told else {*SMALL_SIZES, *range(STRIDE, max_batch, STRIDE), max_batch}
    return tuple(sorted(size for size in sizes if size <= max_batch))
