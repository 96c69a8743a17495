"""A model that counts: after token n comes n + 1, and the KV of a token is its id.

It reads all KV before it computes, so that a page that somebody else has written to shows.
"""

from collections.abc import Callable, Sequence

import torch

from engine.link.messages import TokenOut
from engine.step.sequence_chunk import SequenceChunk

Check = Callable[[Sequence[int]], None]


class CountingStep:
    """As `PendingStep`. Pages are read and written as late as can be: when its tokens are asked
    for."""

    def __init__(
        self, kv_cache: torch.Tensor, chunks: Sequence[SequenceChunk], check: Check
    ) -> None:
        self._kv_cache = kv_cache
        self._check = check
        self._chunks = [(chunk, tuple(chunk.pages)) for chunk in chunks]
        self._token_ids: list[int] | None = None
        self.is_over = True

    def sample(self) -> None: ...

    def wait(self) -> None: ...

    def drafts(self) -> None: ...

    def seconds_behind(self, _before: "CountingStep") -> float:
        return 0.0

    @property
    def token_ids(self) -> list[int]:
        if self._token_ids is None:
            self._token_ids = [self._compute(*each) for each in self._chunks]
        return self._token_ids

    def result(self) -> list[TokenOut | None]:
        return [
            None if chunk.sample is None else TokenOut(token_id=token_id)
            for (chunk, _), token_id in zip(self._chunks, self.token_ids, strict=True)
        ]

    def _compute(self, chunk: SequenceChunk, pages: Sequence[int]) -> int:
        self._check(pages)
        token_ids = list(chunk.token_ids)
        if chunk.follows is not None:
            token_ids = [chunk.follows.step.token_ids[chunk.follows.row]]  # type: ignore[list-item]
        num_tokens = chunk.start + len(token_ids)
        page_tokens = self._kv_cache.shape[2]
        slots = [
            (pages[position // page_tokens], position % page_tokens)
            for position in range(num_tokens)
        ]
        kv = self._kv_cache[0, :, :, 0]
        for position, token_id in enumerate(token_ids, chunk.start):
            kv[slots[position]] = token_id
        first = token_ids[0] - chunk.start
        found = [int(kv[slot]) for slot in slots]
        expected = list(range(first, first + num_tokens))
        assert found == expected, f"pages {list(pages)} hold KV of {found}, not of {expected}"
        return token_ids[-1] + 1


class CountingRunner:
    """As `engine.step.runner.Runner`, of either role. `kv_cache` [1, pages, page_tokens, 1];
    `check` hears of the pages of each chunk, when they are written to."""

    runs_ahead = True

    def __init__(self, kv_cache: torch.Tensor, check: Check) -> None:
        self._kv_cache = kv_cache
        self._check = check

    def begin(
        self, chunks: Sequence[SequenceChunk], _tokens_per_rank: object, _num_drafts: int
    ) -> CountingStep:
        return CountingStep(self._kv_cache, chunks, self._check)

    def step(
        self,
        chunks: Sequence[SequenceChunk],
        _tokens_per_rank: object,
        on_layer: Callable[[int], None],
        _finish: Callable[[], object],
        rows_per_rank: object,
    ) -> list[TokenOut | None]:
        tokens = CountingStep(self._kv_cache, chunks, self._check).result()
        on_layer(0)
        return tokens

    def close(self) -> None: ...
