import struct
from collections.abc import Iterable
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.hashing import prefix_hashes, unpack_hashes
from core.token_ids import pack_ids

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def one_by_one(token_ids: list[int], page_tokens: int) -> list[int]:
    """The formula of the docstring, page by page and token by token."""
    digest = blake2b(b"epserve prefix" + page_tokens.to_bytes(4, "little"), digest_size=8).digest()
    hashes = []
    for page in range(len(token_ids) // page_tokens):
        hasher = blake2b(digest, digest_size=8)
        for token in token_ids[page * page_tokens : (page + 1) * page_tokens]:
            hasher.update(struct.pack("<I", token))
        digest = hasher.digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def hashes_of(token_ids: Iterable[int], page_tokens: int) -> list[int]:
    return list(unpack_hashes(prefix_hashes(pack_ids(token_ids), page_tokens)))


@given(tokens, st.integers(1, 9))
def test_equals_the_formula(token_ids: list[int], page_tokens: int) -> None:
    assert hashes_of(token_ids, page_tokens) == one_by_one(token_ids, page_tokens)


@given(tokens, tokens, st.integers(1, 9))
def test_common_pages_and_only_they_agree(left: list[int], right: list[int], page: int) -> None:
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    pairs = zip(hashes_of(left, page), hashes_of(right, page), strict=False)
    agreeing = [index for index, (a, b) in enumerate(pairs) if a == b]
    assert agreeing == list(range(shared // page))


def test_known_values_never_change() -> None:
    """Routers and gateways of different versions must agree."""
    assert hashes_of(range(128), 64) == [5497303814132078879, 2620979729396065672]


def test_page_sizes_do_not_mix() -> None:
    assert hashes_of([1, 2], 1)[1] != hashes_of([1, 2], 2)[0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="must be"):
        prefix_hashes(pack_ids([1]), 0)
    with pytest.raises(ValueError, match="whole number"):
        unpack_hashes(b"1234567")
