import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.api import Copy
from transfer.ranges import merged_ranges

SIZE = 40


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 10)), min_size=1))
def test_every_byte_keeps_its_source_and_none_is_adjacent_twice(
    triples: list[tuple[int, int, int]],
) -> None:
    copies = [Copy(*triple) for triple in triples]
    moves = sorted(
        (c.source_offset + i, c.target_offset + i) for c in copies for i in range(c.num_bytes)
    )
    ranges = merged_ranges(copies, source_bytes=SIZE, target_bytes=SIZE)
    assert sorted((s + i, t + i) for s, t, n in ranges for i in range(n)) == moves
    for (s, t, n), following in zip(ranges, ranges[1:], strict=False):
        assert (s + n, t + n) != following[:2]


def test_pages_of_a_run_become_one_range_whatever_their_order() -> None:
    pages = [Copy(100 + 10 * i, 500 + 10 * i, 10) for i in range(50)]
    random.Random(1).shuffle(pages)
    assert merged_ranges(pages, source_bytes=600, target_bytes=1000) == [(100, 500, 500)]


def test_adjacent_on_one_side_only_is_not_merged() -> None:
    copies = [Copy(0, 0, 4), Copy(4, 8, 4)]
    assert merged_ranges(copies, source_bytes=8, target_bytes=12) == [(0, 0, 4), (4, 8, 4)]


@pytest.mark.parametrize("copy", [Copy(5, 0, 4), Copy(0, 5, 4), Copy(-1, 0, 2), Copy(0, 0, 0)])
def test_outside_is_refused(copy: Copy) -> None:
    with pytest.raises(ValueError, match="byte"):
        merged_ranges([copy], source_bytes=8, target_bytes=8)
