"""Which tokens a sequence has, and how often each is among its output."""

from collections.abc import Iterable

import numpy as np

FIRST_CAPACITY = 32


class TokenCounts:
    """Grows by one token at constant cost, so that a whole sequence costs linear time.

    `token_ids` int32 and `output_counts` float32 are parallel, each token once, in order of its
    first occurrence; both are views that are valid until the next token.
    """

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._token_ids = np.empty(FIRST_CAPACITY, dtype=np.int32)
        self._counts = np.zeros(FIRST_CAPACITY, dtype=np.float32)

    @property
    def token_ids(self) -> np.ndarray:
        return self._token_ids[: len(self._place)]

    @property
    def output_counts(self) -> np.ndarray:
        return self._counts[: len(self._place)]

    def copy(self) -> "TokenCounts":
        made = TokenCounts()
        made._place = self._place.copy()
        made._token_ids, made._counts = self._token_ids.copy(), self._counts.copy()
        return made

    def see(self, token_ids: Iterable[int]) -> None:
        """Tokens of the prompt: they count as present, but not as output."""
        for token_id in token_ids:
            self._place_of(token_id)

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        place = self._place_of(token_id)  # first, since it may make room
        self._counts[place] += 1

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        return place
