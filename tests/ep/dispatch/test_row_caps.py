"""What arrives is computed in parts where it would become too many rows, with the same bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.dispatch.buffer_plan import collective_terms, deep_ep_terms
from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.deep_ep import DeepEpDispatcher
from ep.dispatch.deep_ep_buffer import DeepEpBuffer
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import AlignedDispatcher, Computed, DispatchedAligned, Payload
from ep.dispatch.row_caps import ARRIVING_BYTES, LEAST_ROWS, bounded, row_parts
from ep.group.group import EpGroup
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.routing_cases import payloads, routing_cases, through_aligned
from tests.ep.thread_ranks import Meeting, on_all_ranks

RANKS, SLOTS, CHOICES, TOKENS, WIDTH, CAP = 4, 5, 3, 6, 2048, 7
NEEDS = DispatchNeeds(
    hidden=WIDTH, itemsize=2, slots_per_rank=SLOTS, num_choices=CHOICES, step_tokens=TOKENS
)


@settings(deadline=None)
@given(
    here=st.lists(st.integers(0, CHOICES), max_size=60),
    cap=st.integers(CHOICES, 40),
    alone=st.booleans(),
)
def test_parts_take_every_token_once_and_no_more_rows_than_the_cap(
    here: list[int], cap: int, alone: bool
) -> None:
    topk_idx = torch.full((len(here), CHOICES), -1)
    for token, num in enumerate(here):
        topk_idx[token, CHOICES - num :] = 0
    parts = row_parts(topk_idx, sum(here), 0 if alone else cap)
    taken = [token for part in parts for token in range(len(here))[part.tokens]]
    assert taken == list(range(len(here)))
    for part in parts:
        assert part.num_rows == sum(here[part.tokens])
        assert alone or part.num_rows <= cap
    assert len(parts) <= (1 if alone or sum(here) <= cap else -(-sum(here) // (cap - CHOICES + 1)))


def test_a_part_holds_at_least_one_token() -> None:
    topk_idx = torch.zeros(4, CHOICES, dtype=torch.int64)
    assert [part.num_rows for part in row_parts(topk_idx, 12, 3)] == [3] * 4
    with pytest.raises(ValueError, match="a token may become 3 rows, the cap is 2"):
        row_parts(topk_idx, 12, 2)


class Counted:
    """Rows and parts of what comes of an aligned dispatch."""

    def __init__(self, aligned: AlignedDispatcher) -> None:
        self._aligned = aligned
        self.rows: list[list[int]] = []
        self.combine_aligned = aligned.combine_aligned

    def dispatch_aligned(self, *arguments: object) -> Iterator[DispatchedAligned]:
        self.rows.append([])

        def counted(part: DispatchedAligned) -> DispatchedAligned:
            self.rows[-1].append(int(part.counts.sum()))
            return part

        dispatch: Callable[..., Iterator[DispatchedAligned]] = self._aligned.dispatch_aligned
        return map(counted, dispatch(*arguments))


Make = Callable[[EpGroup, Meeting, int], AlignedDispatcher]


def exact(group: EpGroup, _: Meeting, cap: int) -> AlignedDispatcher:
    return CollectiveDispatcher(group, SLOTS, row_cap=cap, exact=True)


def partial_sums(group: EpGroup, _: Meeting, cap: int) -> AlignedDispatcher:
    return CollectiveDispatcher(group, SLOTS, row_cap=cap, exact=False)


def deep_ep(group: EpGroup, meeting: Meeting, cap: int) -> AlignedDispatcher:
    needs = replace(NEEDS, row_cap=cap)
    return DeepEpDispatcher(DeepEpBuffer(fake_deep_ep(meeting), group, [needs]), needs)


@pytest.mark.parametrize("make", [exact, partial_sums, deep_ep])
def test_parts_give_the_same_bits(make: Make) -> None:
    """Also where all tokens go to one rank, which has four parts while the others have one: nobody
    waits for anybody."""

    def program(group: EpGroup, meeting: Meeting) -> list[list[int]]:
        whole, first = make(group, meeting, 0), group.rank * SLOTS
        split = Counted(make(group, meeting, CAP))
        for case in routing_cases(RANKS, SLOTS, CHOICES, TOKENS, WIDTH, torch.bfloat16):
            mine, counts = case.by_rank[group.rank], case.tokens_per_rank
            for payload in payloads():
                want = through_aligned(whole, mine, payload, 4, first, counts)
                got = through_aligned(split, mine, payload, 4, first, counts)
                assert torch.equal(got, want), (case.name, payload)
        return split.rows

    by_rank = on_all_ranks(RANKS, program)
    dispatches = list(zip(*by_rank, strict=True))
    assert all(max(rows) <= CAP for parts in dispatches for rows in parts)
    to_one = [parts for parts in dispatches if max(map(sum, parts)) == RANKS * TOKENS * CHOICES]
    assert to_one, "no case sends everything to one rank"
    for parts in to_one:
        assert sorted(map(len, parts))[:-1] == [1] * (RANKS - 1)
        assert max(map(len, parts)) >= RANKS * TOKENS * CHOICES / CAP


def test_a_part_is_let_go_before_the_next() -> None:
    """Rows and results of one part at a time: there is no room for more."""

    def program(group: EpGroup, _: Meeting) -> int:
        held: list[ref[torch.Tensor]] = []

        def compute(part: DispatchedAligned) -> Computed:
            assert not any(tensor() is not None for tensor in held), "of the part before"
            out = part.hidden.clone()
            held.extend(map(ref, (part.hidden, out)))
            return out, part.handle

        dispatcher = CollectiveDispatcher(group, SLOTS, row_cap=CAP, exact=False)
        hidden = torch.ones(TOKENS, WIDTH)
        topk_idx = torch.arange(CHOICES).repeat(TOKENS, 1)  # all of them on the first rank
        parts = dispatcher.dispatch_aligned(
            hidden, topk_idx, torch.ones(TOKENS, CHOICES), (TOKENS,) * 2, Payload.PLAIN, 4
        )
        got = dispatcher.combine_aligned(map(compute, parts))
        assert torch.equal(got, CHOICES * hidden)
        return len(held) // 2

    assert on_all_ranks(2, program) == [8, 1]


@pytest.mark.parametrize("num_ranks", [2, 8, 32, 96, 160])
@pytest.mark.parametrize("chunk", [512, 4096, 16384])
def test_even_loads_are_never_cut(num_ranks: int, chunk: int) -> None:
    needs = replace(NEEDS, hidden=7168, num_choices=8, slots_per_rank=16, step_tokens=chunk)
    capped = bounded(needs, num_ranks)
    assert capped.row_cap >= max(2 * capped.most_tokens * 8, LEAST_ROWS)
    worst = num_ranks * capped.most_tokens * 8
    assert capped.most_rows(num_ranks) == min(capped.row_cap, worst)
    width = 7168 * 2
    terms = {term.name: term.num_bytes for term in deep_ep_terms(capped, num_ranks)}
    assert terms["dispatch: rows by expert"] == 2 * capped.most_rows(num_ranks) * width
    assert terms["dispatch: received tokens"] <= 2 * ARRIVING_BYTES
    gathered = {term.name: term.num_bytes for term in collective_terms(capped, num_ranks)}
    assert gathered["dispatch: rows by expert"] == terms["dispatch: rows by expert"]
    # As long as all tokens of the group have room, they go at once.
    is_whole = num_ranks * chunk * width <= ARRIVING_BYTES
    assert (capped.part_tokens == 0) == is_whole
    assert is_whole or num_ranks * capped.part_tokens * width > ARRIVING_BYTES // 2
