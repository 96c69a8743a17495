"""Our part of a dispatch over DeepEP, against a twin of it that is as strict and less fast."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from core.errors import Unavailable
from ep.dispatch.deep_ep import DeepEpDispatcher
from ep.dispatch.deep_ep_buffer import DeepEpBuffer
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import DispatchedMasked, Payload
from ep.group.group import EpGroup
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.routing_cases import (
    FP8_BOUND,
    KINDS,
    assert_as_expected,
    opened,
    payloads,
    routing_cases,
    through_aligned,
    through_contiguous,
    through_masked,
)
from tests.ep.thread_ranks import Meeting, on_all_ranks

HIDDEN, SLOTS, CHOICES, CAP = 2048, 3, 3, 8
HOW = ("random", "one expert", "one rank", "nobody")
TOKENS = {"some": (5, 0, 3, 8), "none": (0, 0, 0, 0), "full": (8, 8, 8, 8), "one": (0, 1, 0, 0)}


def needs(**changes: int) -> DispatchNeeds:
    values = {
        "hidden": HIDDEN, "itemsize": 2, "slots_per_rank": SLOTS, "num_choices": CHOICES,
        "step_tokens": 64, "masked_tokens": CAP,
    }  # fmt: skip
    return DispatchNeeds(**(values | changes))


@dataclass(frozen=True)
class Tokens:
    """All numbers are such that no sum is rounded, in whatever order it is taken."""

    hidden: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor

    @property
    def expected(self) -> torch.Tensor:
        factor = torch.where(self.topk_idx < 0, 0.0, self.weights * (1 + self.topk_idx % 4))
        return (self.hidden.float() * factor.sum(1, keepdim=True)).bfloat16()


def tokens(how: str, num_tokens: int, num_experts: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :CHOICES]
    if how == "one rank":
        idx = torch.arange(CHOICES).repeat(num_tokens, 1)
    elif how != "random":
        idx = torch.full_like(idx, -1)
        idx[:, 1] = 1 if how == "one expert" else -1
    elif num_tokens:
        idx[-1, 0] = -1
    return Tokens(
        hidden=torch.randint(-1, 2, (num_tokens, HIDDEN), generator=generator).bfloat16(),
        topk_idx=idx,
        weights=torch.randint(1, 3, (num_tokens, CHOICES), generator=generator) / 2,
    )


def plain(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return rows
    return (rows.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).bfloat16()


def masked_experts(sent: DispatchedMasked, rank: int) -> torch.Tensor:
    """Rows that nobody sent come back as NaN."""
    rows = plain(sent.hidden, sent.scales)
    out = torch.full_like(rows, float("nan"))
    for slot, count in enumerate(sent.counts.tolist()):
        out[slot, :count] = rows[slot, :count] * (1 + (rank * SLOTS + slot) % 4)
    return out


def dispatcher_of(group: EpGroup, meeting: Meeting) -> tuple[DeepEpBuffer, DeepEpDispatcher]:
    buffer = DeepEpBuffer(fake_deep_ep(meeting), group, [needs()])
    return buffer, DeepEpDispatcher(buffer, needs())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [2, 4])
def test_normal_mode_is_exact(size: int, how: str) -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        buffer, dispatcher = dispatcher_of(group, meeting)
        for seed, by_rank in enumerate(TOKENS.values()):
            mine = tokens(how, by_rank[group.rank], size * SLOTS, 10 * seed + group.rank)
            beside: list[int] = []
            sent = dispatcher.dispatch(
                mine.hidden, mine.topk_idx, mine.weights, by_rank[:size], partial(beside.append, 1)
            )
            assert beside == [1]
            counts = sent.expert_counts.tolist()
            assert len(counts) == SLOTS
            assert sum(counts) == len(sent.hidden)
            rows = [
                part * (1 + (group.rank * SLOTS + slot) % 4)
                for slot, part in enumerate(sent.hidden.split(counts))
            ]
            assert torch.equal(dispatcher.combine(torch.cat(rows), sent.handle), mine.expected)
        buffer.close()
        assert buffer.raw.calls[-1] == "destroy"

    on_all_ranks(size, program)


@pytest.mark.parametrize("payload", payloads())
@pytest.mark.parametrize("how", HOW)
def test_aligned_form_is_exact(how: str, payload: Payload) -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        _, dispatcher = dispatcher_of(group, meeting)
        for seed, by_rank in enumerate(TOKENS.values()):
            mine = tokens(how, by_rank[group.rank], 4 * SLOTS, 10 * seed + group.rank)
            (sent,) = dispatcher.dispatch_aligned(
                mine.hidden, mine.topk_idx, mine.weights, by_rank, payload, 16
            )
            assert (sent.scales is not None) == bool(payload.num_scales(HIDDEN))
            slots = sent.slot_of
            assert torch.equal(
                torch.bincount(slots[slots >= 0], minlength=SLOTS).int(), sent.counts
            )
            assert not any(
                int((slots == slot).nonzero()[0]) % 16 for slot in slots.unique() if slot >= 0
            )
            factor = torch.where(slots < 0, float("nan"), 1 + (group.rank * SLOTS + slots) % 4)
            rows = opened(sent.hidden, sent.scales, payload, torch.bfloat16)
            out = rows * factor[:, None].bfloat16()
            assert torch.equal(dispatcher.combine_aligned([(out, sent.handle)]), mine.expected)

    on_all_ranks(4, program)


@pytest.mark.parametrize("payload", payloads())
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [2, 4])
def test_low_latency_mode_is_exact(size: int, how: str, payload: Payload) -> None:
    """With and without something to do between its halves; ranks differ in what is padding."""

    def program(group: EpGroup, meeting: Meeting) -> None:
        _, dispatcher = dispatcher_of(group, meeting)
        for seed, (num_rows, by_rank) in enumerate(zip((8, 1, 8, 4), TOKENS.values(), strict=True)):
            mine = tokens(how, num_rows, size * SLOTS, 10 * seed + group.rank)
            mine.topk_idx[min(num_rows, by_rank[group.rank]) :] = -1
            beside: list[int] = []
            sent = dispatcher.dispatch_masked(
                mine.hidden,
                mine.topk_idx,
                mine.weights,
                payload,
                partial(beside.append, 1) if seed % 2 else None,
            )
            assert len(beside) == seed % 2
            assert sent.hidden.shape == (SLOTS, size * CAP, HIDDEN)
            out = masked_experts(sent, group.rank)
            assert torch.equal(dispatcher.combine_masked(out, sent.handle), mine.expected)

    on_all_ranks(size, program)


def test_skewed_routing() -> None:
    """What one rank makes of the tokens of all: the low-latency mode to the bit of its payload, the
    normal one but for the rounding of its partial sums."""

    def program(group: EpGroup, meeting: Meeting) -> int:
        _, dispatcher = dispatcher_of(group, meeting)
        first, compared = group.rank * SLOTS, 0
        for case in routing_cases(4, SLOTS, CHOICES, CAP, HIDDEN, torch.bfloat16):
            mine, counts = case.by_rank[group.rank], case.tokens_per_rank
            for payload in payloads():
                got = through_masked(dispatcher, mine.padded(CAP), payload, first)
                assert not got[len(mine.hidden) :].any()
                own = got[: len(mine.hidden)]
                if payload is Payload.PLAIN:
                    assert_as_expected(case, group.rank, payload, own, exact=True)
                else:  # its scales are rounded otherwise, and now and then a value is
                    plain = case.expected(group.rank, Payload.PLAIN).float()
                    assert (own.float() - plain).norm() <= FP8_BOUND * plain.norm()
            for payload in payloads():
                got = through_aligned(dispatcher, mine, payload, 16, first, counts)
                assert_as_expected(case, group.rank, payload, got, exact=False)
            got = through_contiguous(dispatcher, mine, first, counts)
            assert_as_expected(case, group.rank, Payload.PLAIN, got, exact=False)
            compared += 1
        return compared

    (compared,) = set(on_all_ranks(4, program))
    assert isinstance(compared, int)
    assert compared >= len(KINDS)


def test_two_dispatches_may_be_open_and_no_third() -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        _, dispatcher = dispatcher_of(group, meeting)
        both = [tokens("random", 4, 2 * SLOTS, seed + group.rank) for seed in (1, 7)]
        sent = [
            dispatcher.dispatch_masked(each.hidden, each.topk_idx, each.weights, Payload.PLAIN)
            for each in both
        ]
        with pytest.raises(AssertionError, match="a third dispatch"):
            dispatcher.dispatch_masked(
                both[0].hidden, both[0].topk_idx, both[0].weights, Payload.PLAIN
            )
        for each, one in zip(both, sent, strict=True):
            out = dispatcher.combine_masked(masked_experts(one, group.rank), one.handle)
            assert torch.equal(out, each.expected)

    on_all_ranks(2, program)


def test_more_than_the_cap_is_refused_before_anything_is_sent() -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        buffer, dispatcher = dispatcher_of(group, meeting)
        mine = tokens("random", CAP + 1, 2 * SLOTS, group.rank)
        with pytest.raises(ValueError, match="9 tokens, buffers are for 8"):
            dispatcher.dispatch_masked(mine.hidden, mine.topk_idx, mine.weights, Payload.FP8)
        with pytest.raises(ValueError, match="float32"):
            dispatcher.dispatch(mine.hidden.float(), mine.topk_idx, mine.weights, (9, 9))
        assert buffer.raw.calls == []

    on_all_ranks(2, program)


def test_two_models_share_a_buffer() -> None:
    """Payloads differ from call to call; other shapes ask for a cleaning in between."""

    def program(group: EpGroup, meeting: Meeting) -> None:
        other = needs(hidden=2560, slots_per_rank=SLOTS + 2, masked_tokens=2 * CAP)
        buffer = DeepEpBuffer(fake_deep_ep(meeting), group, [needs(), other])
        first, second = (DeepEpDispatcher(buffer, each) for each in (needs(), other))
        for payload in (Payload.FP8, Payload.PLAIN):
            mine = tokens("random", 3, 2 * SLOTS, group.rank)
            sent = first.dispatch_masked(mine.hidden, mine.topk_idx, mine.weights, payload)
            out = masked_experts(sent, group.rank)
            assert torch.equal(first.combine_masked(out, sent.handle), mine.expected)
        rows = torch.ones(16, 2560, dtype=torch.bfloat16)
        idx = torch.arange(16)[:, None] % (2 * SLOTS + 4)
        for dispatcher, is_clean in ((second, False), (second, True)):
            del buffer.raw.calls[:]
            sent = dispatcher.dispatch_masked(rows, idx, torch.ones(16, 1), Payload.PLAIN)
            assert ("clean" in buffer.raw.calls) != is_clean
            assert torch.equal(second.combine_masked(sent.hidden, sent.handle), rows)

    on_all_ranks(2, program)


def test_modes_alternate_between_nodes() -> None:
    """Sixteen ranks: the normal mode leaves its rows where the other has its signals."""

    def program(group: EpGroup, meeting: Meeting) -> None:
        small = needs(slots_per_rank=1, masked_tokens=4)
        buffer = DeepEpBuffer(fake_deep_ep(meeting), group, [small])
        dispatcher = DeepEpDispatcher(buffer, small)
        mine = tokens("random", 1, 16, group.rank)
        for is_normal in (True, True, False, False, True, False):
            if is_normal:
                normal = dispatcher.dispatch(mine.hidden, mine.topk_idx, mine.weights, (1,) * 16)
                dispatcher.combine(normal.hidden, normal.handle)
                continue
            sent = dispatcher.dispatch_masked(
                mine.hidden, mine.topk_idx, mine.weights, Payload.PLAIN
            )
            dispatcher.combine_masked(sent.hidden, sent.handle)
        assert buffer.raw.calls.count("clean") == 2

    on_all_ranks(16, program)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"itemsize": 4}, "bfloat16 only"),
        ({"hidden": 1920}, "not of 1920"),
        ({"hidden": 8192}, "do not fit its queues"),
        ({"num_choices": 12}, "12 experts a token"),
        ({"slots_per_rank": 1025}, "1025 experts a rank"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, int], reason: str) -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        with pytest.raises(ValueError, match=reason):
            DeepEpBuffer(fake_deep_ep(meeting), group, [needs(**changes)])

    on_all_ranks(2, program)


def test_close_leaves_the_buffers_when_a_peer_is_gone() -> None:
    def program(group: EpGroup, meeting: Meeting) -> list[str]:
        buffer, _ = dispatcher_of(group, meeting)
        if group.rank:
            group.close()
        else:
            buffer.close()
            with pytest.raises(Unavailable):
                group.exchange((0,))
        calls: list[str] = buffer.raw.calls
        return calls

    assert on_all_ranks(2, program) == [[], []]
