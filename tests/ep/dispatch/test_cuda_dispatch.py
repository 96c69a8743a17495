"""Dispatchers on GPUs: skewed routings on one, over NCCL on two, and as captured graphs."""

import pytest
import torch

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.dispatcher import MaskedDispatcher, Payload
from ep.dispatch.local import LocalDispatcher
from ep.group.group import EpGroup
from tests.ep.cuda_ranks import on_gpus
from tests.ep.routing_cases import (
    RoutingCase,
    Tokens,
    assert_as_expected,
    opened,
    payloads,
    routing_cases,
    through_aligned,
    through_masked,
)

pytestmark = pytest.mark.gpu

SLOTS, CHOICES, CAP, WIDTH = 16, 8, 24, 7168


def cases(num_ranks: int, device: str) -> list[RoutingCase]:
    return list(routing_cases(num_ranks, SLOTS, CHOICES, CAP, WIDTH, torch.bfloat16, device))


def test_one_gpu() -> None:
    masked, aligned = LocalDispatcher(SLOTS, CAP), LocalDispatcher(SLOTS)
    on_cpu = cases(1, "cpu")
    for case, here in zip(on_cpu, cases(1, "cuda"), strict=True):
        (tokens,), counts = here.by_rank, case.tokens_per_rank
        for payload in payloads("cuda"):
            # Of FP8 a value on the edge may be rounded either way.
            loose = payload.quantises
            got = through_masked(masked, tokens.padded(CAP), payload, 0).cpu()
            assert not got[counts[0] :].any()
            assert_as_expected(case, 0, payload, got[: counts[0]], exact=False, loose=loose)
            for alignment in (1, 128):
                got = through_aligned(aligned, tokens, payload, alignment, 0, counts).cpu()
                assert_as_expected(case, 0, payload, got, exact=False, loose=loose)


def two_gpus(group: EpGroup, device: torch.device) -> None:
    first = group.rank * SLOTS
    for exact in (True, False):
        masked = CollectiveDispatcher(group, SLOTS, CAP, exact=exact)
        aligned = CollectiveDispatcher(group, SLOTS, exact=exact)
        for case in cases(group.size, str(device)):
            tokens, counts = case.by_rank[group.rank], case.tokens_per_rank
            own = len(tokens.hidden)
            for payload in payloads(str(device)):
                got = through_masked(masked, tokens.padded(CAP), payload, first)
                assert not got[own:].any()
                assert_as_expected(case, group.rank, payload, got[:own], exact=exact)
                got = through_aligned(aligned, tokens, payload, 128, first, counts)
                assert_as_expected(case, group.rank, payload, got, exact=exact)
    for payload in payloads(str(device)):
        captured(group, device, payload)


def through_all_rows(
    dispatcher: MaskedDispatcher, tokens: Tokens, payload: Payload, first_slot: int
) -> torch.Tensor:
    """[T, H], without asking how many rows there are."""
    sent = dispatcher.dispatch_masked(tokens.hidden, tokens.topk_idx, tokens.weights, payload)
    rows = opened(sent.hidden, sent.scales, payload, tokens.hidden.dtype)
    slots = torch.arange(first_slot, first_slot + len(rows), device=rows.device)
    return dispatcher.combine_masked(rows * (0.5 + slots % 7)[:, None, None], sent.handle)


def captured(group: EpGroup, device: torch.device, payload: Payload) -> None:
    """A graph of dispatch and combine, replayed for all routings."""
    masked = CollectiveDispatcher(group, SLOTS, CAP)
    every_case = cases(group.size, str(device))
    static = every_case[0].by_rank[group.rank].padded(CAP)
    first = group.rank * SLOTS

    def step() -> torch.Tensor:
        return through_all_rows(masked, static, payload, first).to(torch.bfloat16)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = step()
    for case in every_case:
        tokens = case.by_rank[group.rank].padded(CAP)
        static.hidden.copy_(tokens.hidden)
        static.topk_idx.copy_(tokens.topk_idx)
        static.weights.copy_(tokens.weights)
        graph.replay()
        got = out.clone()
        assert torch.equal(got, step()), case.name
        alone = LocalDispatcher(group.size * SLOTS, CAP)
        want = through_all_rows(alone, tokens, payload, 0)
        torch.testing.assert_close(got, want.to(got.dtype), rtol=2**-6, atol=2**-6)


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    on_gpus(2, two_gpus)
