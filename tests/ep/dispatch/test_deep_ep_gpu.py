"""Dispatchers between GPUs at the size of DeepSeek-V3: each against what one rank makes of the
tokens of all, eagerly and in captured graphs."""

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import pytest
import torch

from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import MaskedDispatcher, Payload
from ep.dispatch.dispatcher_choice import Choice, DispatcherName, RankFacts, deep_ep_obstacle
from ep.dispatch.dispatchers import Dispatchers, make_dispatchers
from ep.dispatch.rank_facts import own_facts
from ep.group.group import EpGroup
from ep.group.group_watch import EXIT_CODE
from tests.ep.routing_cases import (
    FP8_BOUND,
    RoutingCase,
    Tokens,
    assert_as_expected,
    opened,
    payloads,
    routing_cases,
    through_aligned,
    through_contiguous,
    through_masked,
)

pytestmark = pytest.mark.gpu

HIDDEN, EXPERTS, CHOICES, CAP, ALIGNMENT = 7168, 256, 8, 128, 128
TOKENS = (1, 16, 64, 128)
PATIENCE_SECONDS = 400.0
FACTORS = 5  # by which experts differ


def needs(num_ranks: int, changes: Mapping[str, int]) -> DispatchNeeds:
    values = {
        "hidden": HIDDEN, "itemsize": 2, "slots_per_rank": EXPERTS // num_ranks,
        "num_choices": CHOICES, "step_tokens": CAP, "masked_tokens": CAP,
    }  # fmt: skip
    return DispatchNeeds(**(values | changes))


def skewed(group: EpGroup, device: torch.device, made: Dispatchers) -> None:
    first = group.rank * (EXPERTS // group.size)
    for cap in TOKENS:
        for case in routing_cases(
            group.size, EXPERTS // group.size, CHOICES, cap, HIDDEN, torch.bfloat16, str(device)
        ):
            compare(group, made, case, first, cap)


def compare(group: EpGroup, made: Dispatchers, case: RoutingCase, first: int, cap: int) -> None:
    mine, counts = case.by_rank[group.rank], case.tokens_per_rank
    assert made.masked is not None
    assert made.aligned is not None
    for payload in payloads(str(mine.hidden.device)):
        got = through_masked(made.masked, mine.padded(cap), payload, first)
        near(case, group.rank, payload, got[: len(mine.hidden)])
    for payload in payloads(str(mine.hidden.device)):
        got = through_aligned(made.aligned, mine, payload, ALIGNMENT, first, counts)
        near(case, group.rank, payload, got)
    if not case.has_nobody:
        got = through_contiguous(made.dispatcher, mine, first, counts)
        near(case, group.rank, Payload.PLAIN, got)


def near(case: RoutingCase, rank: int, payload: Payload, got: torch.Tensor) -> None:
    """Partial sums may be rounded to bfloat16 on their way, values to FP8."""
    want = case.expected(rank, Payload.PLAIN).float()
    assert not got.isnan().any(), case.name
    error = (got.float() - want).norm()
    bound = FP8_BOUND if payload.quantises else 2**-7
    assert error <= bound * want.norm() + 1e-6, (case.name, payload, float(error))


def low_latency_is_exact(group: EpGroup, device: torch.device, made: Dispatchers) -> None:
    """Rows return unweighted and are added up in float32: but for one rounding at the end, which
    fused multiply-adds may move by a bit."""
    assert made.masked is not None
    first = group.rank * (EXPERTS // group.size)
    for case in routing_cases(
        group.size, EXPERTS // group.size, CHOICES, 16, HIDDEN, torch.bfloat16, str(device)
    ):
        mine = case.by_rank[group.rank]
        got = through_masked(made.masked, mine.padded(16), Payload.PLAIN, first)
        own = got[: len(mine.hidden)]
        assert_as_expected(case, group.rank, Payload.PLAIN, own, exact=False)


def captured(group: EpGroup, device: torch.device, made: Dispatchers) -> None:
    """Replays see what is in the inputs by then, with two layers in a graph and other work between
    the halves of a dispatch."""
    assert made.masked is not None
    for num_tokens in TOKENS:
        for payload in payloads(str(device)):
            static = random_tokens(num_tokens, 0, group.rank, device)
            through = two_layers(group, made.masked, payload)
            through(static)  # what is built lazily is not to be captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = through(static)
            for seed in (1, 2, 3):
                tokens = random_tokens(num_tokens, seed, group.rank, device)
                want = through(tokens).clone()
                static.hidden.copy_(tokens.hidden)
                static.topk_idx.copy_(tokens.topk_idx)
                static.weights.copy_(tokens.weights)
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(out, want), (num_tokens, payload, seed)


def two_layers(
    group: EpGroup, masked: MaskedDispatcher, payload: Payload
) -> Callable[[Tokens], torch.Tensor]:
    num_slots = EXPERTS // group.size
    slots = torch.arange(num_slots, device="cuda") + group.rank * num_slots
    factors = (1 + slots % FACTORS).to(torch.bfloat16)[:, None, None] / 4

    def layer(tokens: Tokens) -> torch.Tensor:
        beside: list[torch.Tensor] = []
        sent = masked.dispatch_masked(
            tokens.hidden,
            tokens.topk_idx,
            tokens.weights,
            payload,
            lambda: beside.append(tokens.hidden * 0.5),
        )
        rows = opened(sent.hidden, sent.scales, payload, torch.bfloat16)
        return masked.combine_masked(rows * factors, sent.handle) + beside[0]

    def through(tokens: Tokens) -> torch.Tensor:
        hidden = layer(tokens)
        return layer(Tokens(hidden, tokens.topk_idx.flip(0), tokens.weights))

    return through


def random_tokens(num_tokens: int, seed: int, rank: int, device: torch.device) -> Tokens:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * num_tokens + rank)
    idx = torch.rand(num_tokens, EXPERTS, generator=generator).topk(CHOICES, dim=1).indices
    idx[:, -1][torch.rand(num_tokens, generator=generator) < 0.3] = -1
    tokens = Tokens(
        torch.randn(num_tokens, HIDDEN, generator=generator),
        idx,
        torch.rand(num_tokens, CHOICES, generator=generator) / CHOICES,
    )
    return tokens.to(str(device), torch.bfloat16)


def lose_a_peer(group: EpGroup, device: torch.device, made: Dispatchers) -> None:
    """The last rank dies; the others are in a kernel that waits for it."""
    assert made.masked is not None
    through = two_layers(group, made.masked, Payload.FP8)
    tokens = random_tokens(16, 1, group.rank, device)
    through(tokens)
    torch.cuda.synchronize()
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    through(tokens)
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Outcome:
    failure: str = ""
    obstacle: str = ""


PROGRAMS = {
    "skewed": skewed,
    "captured": captured,
    "exact": low_latency_is_exact,
    "lose": lose_a_peer,
}


def on_rank(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    name: DispatcherName,
    programs: str,
    changes: Mapping[str, int],
) -> None:
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = EpGroup.create(
            rank=rank,
            size=size,
            rendezvous=f"127.0.0.1:{port}",
            device=device,
            timeout_seconds=120.0,
        )
        facts = group.exchange(own_facts(device))
        wanted = needs(size, changes)
        obstacle = deep_ep_obstacle(wanted, [RankFacts(*one) for one in facts])
        if name == "deep_ep" and obstacle:
            pipe.send(Outcome(obstacle=obstacle))
            return
        choice = Choice(name=name, reason="the test", is_wish=True)
        made = make_dispatchers(group, choice, wanted, device)
        for program in programs.split():
            PROGRAMS[program](group, device, made)
        torch.cuda.synchronize()
        made.close()
        group.close()
        pipe.send(Outcome())
    except Exception:  # noqa: BLE001 - reported to the test
        pipe.send(Outcome(failure=traceback.format_exc()))


class Ranks:
    """Processes, one a GPU, killed in the end whatever they do."""

    def __init__(self, size: int, name: DispatcherName, programs: str, **changes: int) -> None:
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, port, name, programs, changes)
            self.processes.append(context.Process(target=on_rank, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def outcome(self, rank: int) -> Outcome | None:
        """None when it ended without a word."""
        assert wait([self.pipes[rank]], PATIENCE_SECONDS), "a rank does not answer"
        try:
            outcome: Outcome = self.pipes[rank].recv()
        except EOFError:
            return None
        assert not outcome.failure, outcome.failure
        if outcome.obstacle:
            pytest.skip(f"no DeepEP: {outcome.obstacle}")
        return outcome

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("name", "programs"),
    [("collective", "skewed captured"), ("deep_ep", "skewed exact captured skewed")],
)
@pytest.mark.parametrize("size", [2, 4])
def test_between_gpus(size: int, name: DispatcherName, programs: str) -> None:
    with Ranks(size, name, programs) as ranks:
        assert all(ranks.outcome(rank) == Outcome() for rank in range(size))


@pytest.mark.parametrize("name", ["collective", "deep_ep"])
def test_what_arrives_in_parts(name: DispatcherName) -> None:
    """All tokens of two ranks at one of them are 2,048 rows."""
    with Ranks(2, name, "skewed", row_cap=500) as ranks:
        assert all(ranks.outcome(rank) == Outcome() for rank in range(2))


def test_the_low_latency_mode_alone() -> None:
    """As decode groups have it: without queues of the normal mode."""
    with Ranks(2, "deep_ep", "exact captured exact", masked_only=1) as ranks:
        assert all(ranks.outcome(rank) == Outcome() for rank in range(2))


def test_a_lost_peer_ends_the_others() -> None:
    """Within seconds, from within a kernel without a time limit."""
    with Ranks(2, "deep_ep", "lose") as ranks:
        assert ranks.outcome(1) is None
        assert ranks.outcome(0) is None
        ranks.processes[0].join(PATIENCE_SECONDS)
        assert ranks.processes[0].exitcode == EXIT_CODE
