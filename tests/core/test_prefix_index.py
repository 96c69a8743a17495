from hypothesis import given
from hypothesis import strategies as st

from core.hashing import prefix_hashes, unpack_hashes
from core.prefix_index import PrefixIndex
from core.token_ids import pack_ids


def hashes_of(prompt: list[int]) -> tuple[int, ...]:
    return unpack_hashes(prefix_hashes(pack_ids(prompt), 2))


prompts = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(prompts, max_size=8), prompts)
def test_unbounded_it_finds_the_longest_match(sent: list[list[int]], new: list[int]) -> None:
    index = PrefixIndex(10**6)
    for prompt in sent:
        index.record("w", hashes_of(prompt))
    longest = 0
    for prompt in sent:
        pages = 0
        while (pages + 1) * 2 <= len(new) and prompt[: (pages + 1) * 2] == new[: (pages + 1) * 2]:
            pages += 1
        longest = max(longest, pages)
    assert index.num_matched("w", hashes_of(new)) == longest


@given(st.lists(prompts, max_size=20), st.integers(0, 5))
def test_it_is_bounded_and_keeps_the_last_prompts_beginning(
    sent: list[list[int]], max_pages: int
) -> None:
    index = PrefixIndex(max_pages)
    for prompt in sent:
        hashes = hashes_of(prompt)
        index.record("w", hashes)
        assert index.num_matched("w", hashes) == min(len(hashes), max_pages)
        assert len(index._pages["w"]) <= max_pages


def test_workers_are_apart_and_forgotten() -> None:
    index = PrefixIndex(10)
    index.record("a", [1, 2, 3])
    assert index.num_matched("b", [1, 2, 3]) == 0
    index.record("b", [1])
    index.forget("a")
    index.forget("never seen")
    assert index.num_matched("a", [1, 2, 3]) == 0
    assert index.num_matched("b", [1, 2, 3]) == 1


def test_the_shared_beginning_outlives_the_ends() -> None:
    index = PrefixIndex(4)
    index.record("w", [1, 2, 3])
    index.record("w", [1, 2, 4])
    index.record("w", [1, 2, 5])
    assert index.num_matched("w", [1, 2]) == 2
    assert index.num_matched("w", [1, 2, 3]) == 2  # 3 had to go
