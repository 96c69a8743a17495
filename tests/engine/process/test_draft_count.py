"""How many drafts pay, held against what was measured."""

import re
from functools import cache
from itertools import pairwise

import pytest

from bench.records import RESULTS, read
from bench.table import newest
from engine.process.draft_count import (
    FIRST_SHARE,
    MOST_REQUESTS,
    OF_REQUEST,
    TRIED_EVERY,
    draft_count,
    drafts_that_pay,
    own_drafts,
    share_after,
)

CASE = re.compile(r"(w4afp8|fp8), 61 layers, context 2048(?:, (\d) drafts, .*)?, batch (\d+)")
METRIC = re.compile("step with its launch( and its wait)?")


@cache
def measured() -> dict[tuple[str, int], dict[int, float]]:
    """Milliseconds of a step by format and batch, and by drafts."""
    times: dict[tuple[str, int], dict[int, float]] = {}
    for record in newest(read(RESULTS / "decode_rank.jsonl")):
        match = CASE.fullmatch(record.case)
        if match and METRIC.fullmatch(record.metric):
            of_case = times.setdefault((match[1], int(match[3])), {})
            of_case[int(match[2] or 0)] = record.value
    return {case: of_case for case, of_case in times.items() if len(of_case) > 1}


def tokens(share: float, count: int) -> float:
    return sum(share**index for index in range(count + 1))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_batch_that_was_measured_is_slower_than_without(most: int) -> None:
    assert {batch for _, batch in measured()} == {1, 8, 32, 64, 128}
    for (_, batch), times in measured().items():
        for percent in range(101):
            share = percent / 100
            count = draft_count(share, batch, most)
            # FP8 with two drafts was not measured.
            time = times[count] if count in times else (times[1] + times[3]) / 2
            assert tokens(share, count) / time >= 0.98 / times[0], (batch, share, count)


def test_more_are_made_where_more_are_right_and_none_where_nothing_is_known() -> None:
    for num_requests in (1, 20, 64, MOST_REQUESTS):
        counts = [draft_count(percent / 100, num_requests, 5) for percent in range(101)]
        assert all(before <= after for before, after in pairwise(counts))
        assert counts[0] == 0
        assert counts[100] > 0
    assert draft_count(FIRST_SHARE, 32, 3) == 3
    assert draft_count(FIRST_SHARE, MOST_REQUESTS, 3) == 1
    assert draft_count(1.0, MOST_REQUESTS + 1, 5) == 0
    assert drafts_that_pay([1.0] * (MOST_REQUESTS + 1), 5, 0) == 0
    assert drafts_that_pay([], 5, 0) == 0


def test_a_request_follows_its_own_drafts() -> None:
    share = FIRST_SHARE
    for _ in range(50):
        share = share_after(share, 3, 0, OF_REQUEST)
    assert share < 0.1
    assert own_drafts(share, 32, 3) == 1, "by which it may come back"
    assert share_after(share, 0, -1, OF_REQUEST) == share
    for _ in range(50):
        share = share_after(share, 3, 3, OF_REQUEST)
    assert share > 0.9
    assert own_drafts(share, 32, 3) == 3
    # The third one says nothing, since the second was wrong.
    assert share_after(0.5, 3, 1, 0.5) == pytest.approx(0.375)


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    tried = [drafts_that_pay([0.1] * 4, 3, step) for step in range(3 * TRIED_EVERY)]
    assert sum(tried) == 6
    assert tried[TRIED_EVERY : TRIED_EVERY + 3] == [1, 1, 0]
    assert drafts_that_pay([0.1] * 4, 0, 0) == 0
