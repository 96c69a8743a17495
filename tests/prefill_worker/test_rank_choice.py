"""Which rank gets a request: the least loaded, unless another one knows enough of the prompt."""

from collections.abc import Sequence

import pytest

from core.hashing import prefix_hashes
from core.token_ids import pack_ids
from prefill_worker.rank_choice import RankChoice

PAGE = 4


def choose(choice: RankChoice, prompt: Sequence[int]) -> int:
    return choice.choose(len(prompt), prefix_hashes(pack_ids(prompt), PAGE))


def test_the_least_loaded_rank_is_taken() -> None:
    choice = RankChoice(3, PAGE)
    assert [choose(choice, [rank] * 10) for rank in range(3)] == [0, 1, 2]
    choice.done(1, 10)
    assert choose(choice, [9] * 3) == 1
    assert choice.open_tokens == [10, 3, 10]


def test_a_rank_that_knows_the_prefix_is_taken_while_that_pays_off() -> None:
    choice = RankChoice(2, PAGE)
    prompt = list(range(40))
    assert choose(choice, prompt) == 0
    choice.done(0, 40)
    other = list(range(100, 120))
    assert choose(choice, other) == 0  # equal costs: the lower rank
    assert choose(choice, [*prompt, 1]) == 0  # 20 open + 1 to compute there, 41 at the other
    assert choose(choice, [*prompt, 2]) == 1  # 61 open + 1 there by now


@pytest.mark.parametrize(("open_tokens", "expected"), [(2 * PAGE - 1, 0), (2 * PAGE + 1, 1)])
def test_memory_is_bounded_and_keeps_beginnings(open_tokens: int, expected: int) -> None:
    choice = RankChoice(2, PAGE, max_pages=4)
    first, second = list(range(16)), list(range(100, 108))
    for prompt in (first, second):
        choice.done(choose(choice, prompt), len(prompt))
    # Rank 0 still knows two of four pages of the first prompt: the ones it begins with.
    choice.open_tokens = [open_tokens, 0]
    assert choose(choice, first) == expected


@pytest.mark.parametrize("hashes", [b"", b"half of", bytes(8 * 1000)])
def test_hashes_that_cannot_be_those_of_the_prompt_cost_nothing_but_affinity(
    hashes: bytes,
) -> None:
    choice = RankChoice(2, PAGE)
    assert [choice.choose(10, hashes) for _ in range(2)] == [0, 1]


def test_one_rank_gets_everything() -> None:
    choice = RankChoice(1, PAGE)
    assert [choose(choice, list(range(number))) for number in (1000, 3, 1000)] == [0, 0, 0]
    assert choice.open_tokens == [2003]
