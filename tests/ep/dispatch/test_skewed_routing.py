"""Each dispatcher makes of skewed routings what a single rank makes of the tokens of all."""

import pytest
import torch

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.dispatcher import Payload
from ep.dispatch.local import LocalDispatcher
from ep.group.group import EpGroup
from tests.ep.routing_cases import (
    RoutingCase,
    assert_as_expected,
    expert,
    payloads,
    routing_cases,
    through_aligned,
    through_contiguous,
    through_masked,
)
from tests.ep.thread_ranks import Meeting, on_all_ranks

SLOTS, CHOICES, CAP, WIDTH = 5, 3, 6, 256


def cases(num_ranks: int, dtype: torch.dtype) -> list[RoutingCase]:
    return list(routing_cases(num_ranks, SLOTS, CHOICES, CAP, WIDTH, dtype))


def slow_sum(case: RoutingCase) -> torch.Tensor:
    """[T, H] float64 of the only rank, one choice after the other."""
    (tokens,) = case.by_rank
    out = torch.zeros(tokens.hidden.shape, dtype=torch.float64)
    for t, (choices, weights) in enumerate(zip(tokens.topk_idx, tokens.weights, strict=True)):
        for slot, weight in zip(choices.tolist(), weights.tolist(), strict=True):
            if slot >= 0:
                out[t] += weight * expert(slot, tokens.hidden[t]).double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank(dtype: torch.dtype) -> None:
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for case in cases(1, dtype):
        (tokens,), counts = case.by_rank, case.tokens_per_rank
        padded = tokens.padded(CAP)
        for payload in payloads():
            got = through_masked(LocalDispatcher(SLOTS, CAP), padded, payload, 0)
            assert not got[len(tokens.hidden) :].any()
            assert_as_expected(case, 0, payload, got[: len(tokens.hidden)], exact=True)
            for alignment in (1, 4):
                got = through_aligned(LocalDispatcher(SLOTS), tokens, payload, alignment, 0, counts)
                assert_as_expected(case, 0, payload, got, exact=True)
        if not case.has_nobody:
            got = through_contiguous(LocalDispatcher(SLOTS), tokens, 0, counts)
            assert_as_expected(case, 0, Payload.PLAIN, got, exact=True)
        want = case.expected(0, Payload.PLAIN)
        torch.testing.assert_close(want.double(), slow_sum(case), rtol=bound, atol=bound)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_collective(num_ranks: int, dtype: torch.dtype, exact: bool) -> None:
    def on_rank(group: EpGroup, meeting: Meeting) -> int:
        masked = CollectiveDispatcher(group, SLOTS, CAP, exact=exact)
        aligned = CollectiveDispatcher(group, SLOTS, exact=exact)
        first, compared = group.rank * SLOTS, 0
        for case in cases(num_ranks, dtype):
            tokens, counts = case.by_rank[group.rank], case.tokens_per_rank
            own = len(tokens.hidden)
            for payload in payloads():
                got = through_masked(masked, tokens.padded(CAP), payload, first)
                assert not got[own:].any()
                assert_as_expected(case, group.rank, payload, got[:own], exact=exact)
                got = through_aligned(aligned, tokens, payload, 4, first, counts)
                assert_as_expected(case, group.rank, payload, got, exact=exact)
            if exact and not case.has_nobody:
                contiguous = CollectiveDispatcher(group, SLOTS)
                got = through_contiguous(contiguous, tokens, first, counts)
                assert_as_expected(case, group.rank, Payload.PLAIN, got, exact=True)
            compared += own
        return compared

    assert sum(on_all_ranks(num_ranks, on_rank)) > 50


def test_without_a_word_cpus_are_exact() -> None:
    case = cases(2, torch.float32)[0]

    def on_rank(group: EpGroup, meeting: Meeting) -> None:
        tokens = case.by_rank[group.rank]
        masked = CollectiveDispatcher(group, SLOTS, CAP)
        got = through_masked(masked, tokens.padded(CAP), Payload.PLAIN, group.rank * SLOTS)
        own = len(tokens.hidden)
        assert_as_expected(case, group.rank, Payload.PLAIN, got[:own], exact=True)

    on_all_ranks(2, on_rank)


@pytest.mark.parametrize("payload", payloads())
def test_past_the_cap_nothing_is_sent(payload: Payload) -> None:
    """All ranks refuse, and are in step behind it."""
    full = cases(2, torch.float32)[1]
    assert full.tokens_per_rank == (CAP, CAP)

    def on_rank(group: EpGroup, meeting: Meeting) -> None:
        tokens = full.by_rank[group.rank]
        masked = CollectiveDispatcher(group, SLOTS, CAP - 1)
        with pytest.raises(ValueError, match="6 tokens in a dispatch for at most 5"):
            through_masked(masked, tokens, payload, group.rank * SLOTS)
        got = through_masked(
            CollectiveDispatcher(group, SLOTS, CAP), tokens, payload, group.rank * SLOTS
        )
        assert_as_expected(full, group.rank, payload, got, exact=True)

    on_all_ranks(2, on_rank)
    alone = LocalDispatcher(2 * SLOTS, CAP - 1)
    with pytest.raises(ValueError, match="6 tokens in a dispatch for at most 5"):
        through_masked(alone, full.by_rank[0], payload, 0)


def test_dispatchers_of_nothing_are_refused() -> None:
    for make in (
        lambda: LocalDispatcher(0, 1),
        lambda: LocalDispatcher(1, -1),
    ):
        with pytest.raises(ValueError):
            make()
