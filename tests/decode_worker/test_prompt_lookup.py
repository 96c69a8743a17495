"""Look-ups against a plain search."""

import random
from collections.abc import Sequence

import pytest

from decode_worker.prompt_lookup import LENGTHS, PromptLookup


def found(token_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """By trying all places, the latest first."""
    for length in LENGTHS:
        last = token_ids[len(token_ids) - length :]
        for begin in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[begin : begin + length] == last:
                return tuple(token_ids[begin + length : begin + length + most])
    return ()


@pytest.mark.parametrize("num_kinds", [2, 4, 9])
def test_what_followed_the_last_tokens_is_found(num_kinds: int) -> None:
    choose = random.Random(num_kinds)
    for length in range(30):
        token_ids = [choose.randrange(num_kinds) for _ in range(length)]
        lookup = PromptLookup(token_ids)
        for most in (1, 3, 5):
            added = [choose.randrange(num_kinds) for _ in range(choose.randrange(3))]
            token_ids += added
            lookup.add(added)
            assert lookup.drafts(most) == found(token_ids, most)
