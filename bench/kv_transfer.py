"""KV pages of a prompt from one GPU to another, through NIXL: `python -m bench.kv_transfer`.

A prompt of 4,096 tokens in all layers of DeepSeek-V3, out of a prefill rank's pool into a decode
rank's: both new, and both as they are after an hour of use (`bench.ranks.used_pool`). Sent in one
go, and layer by layer as prefill workers send. Records bytes a second and how many descriptors that
took; what has arrived is compared with what was sent. Without GPUs the same on the host, with fewer
layers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from bench.ranks.ep_ranks import on_all_ranks
from bench.ranks.used_pool import PAGE_TOKENS, used_pool
from bench.records import bench_parser, path_of, report
from engine.kv.pages import PagePool
from engine.link.messages import PageRun
from ep.group.group import EpGroup
from loadgen.records import BenchRun
from transfer.api import AgentDescriptor, Copy, State
from transfer.nixl_agent import NixlTransfer
from transfer.ranges import merged_ranges

BENCH = "kv_transfer"
RECEIVER = 0
PATIENCE_SECONDS = 60.0
GOAL = "goal"
GOAL_GIGABYTES = 190.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_layers: int
    num_pages: int  # of a pool
    page_bytes: int  # in one layer
    prompt_tokens: int
    repeats: int
    requests: int  # that have used a pool before

    @classmethod
    def of(cls, arguments: argparse.Namespace, *, page_bytes: int) -> "Size":
        """From the flags of `add_size`."""
        return cls(
            num_layers=arguments.layers,
            num_pages=arguments.pages,
            page_bytes=page_bytes,
            prompt_tokens=arguments.tokens,
            repeats=arguments.repeats,
            requests=arguments.requests,
        )

    @property
    def prompt_pages(self) -> int:
        return -(-self.prompt_tokens // PAGE_TOKENS)

    @property
    def prompt_bytes(self) -> int:
        return self.num_layers * self.prompt_pages * self.page_bytes


def add_size(parser: argparse.ArgumentParser, *, layers: int, tokens: int, on_gpu: bool) -> None:
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--pages", type=int, default=8192 if on_gpu else 1024, help="of a pool")
    parser.add_argument("--tokens", type=int, default=tokens, help="of the prompt")
    parser.add_argument("--requests", type=int, default=10_800, help="that came before")
    parser.add_argument("--repeats", type=int, default=9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    case: str
    seconds: float
    descriptors: int


class Goal(msgspec.Struct, frozen=True):
    """Where a prompt goes."""

    agent: AgentDescriptor
    runs: tuple[PageRun, ...]


def measure(group: EpGroup, device: torch.device, size: Size) -> list[Figures]:
    """On both ranks at once; the sender knows the figures."""
    shape = (size.num_layers, size.num_pages, size.page_bytes)
    cache = torch.zeros(shape, dtype=torch.uint8, device=device)
    if group.rank != RECEIVER:
        for layer in cache:
            layer.random_(0, 256)
    transfer = NixlTransfer(f"{BENCH}-{group.rank}-{time.time_ns()}")
    transfer.register(cache)
    figures: list[Figures] = []
    for age in ("new", "used"):
        runs = pages_of_prompt(age, group.rank, size)
        goal = meet(group, transfer, runs)
        for way, ranges in (("at once", [range(size.num_layers)]), ("by layer", each(size))):
            case = f"{size.prompt_tokens} tokens, {size.num_layers} layers, {age} pools, {way}"
            if group.rank == RECEIVER:
                receive(transfer, size.repeats * len(ranges))
            else:
                figures.append(send(case, transfer, goal, runs, ranges, size, device))
            group.exchange([0])
        check(group, cache, runs, size)
    transfer.close()
    return figures


def each(size: Size) -> list[range]:
    return [range(layer, layer + 1) for layer in range(size.num_layers)]


def pages_of_prompt(age: str, rank: int, size: Size) -> tuple[PageRun, ...]:
    num_pages = size.prompt_pages
    pool = PagePool(size.num_pages)
    if age == "used":
        pool = used_pool(
            size.num_pages,
            role="decode" if rank == RECEIVER else "prefill",
            seed=rank,
            room=num_pages,
            num_requests=size.requests,
        )
    return tuple(pool.allocate("the prompt", num_pages))


def meet(group: EpGroup, transfer: NixlTransfer, runs: tuple[PageRun, ...]) -> Goal:
    """The receiver's goal, on both ranks."""
    told = b""
    if group.rank == RECEIVER:
        told = msgspec.msgpack.encode(Goal(transfer.describe(), runs))
    num_bytes = group.exchange([len(told)])[RECEIVER][0]
    return msgspec.msgpack.decode(group.broadcast(told, num_bytes), type=Goal)


def copies_of(
    ours: Sequence[PageRun], theirs: Sequence[PageRun], layers: range, size: Size
) -> Iterator[Copy]:
    """Page by page."""
    source_pages, target_pages = (
        [page for run in runs for page in range(run.first, run.first + run.count)]
        for runs in (ours, theirs)
    )
    for layer in layers:
        begin = layer * size.num_pages
        for source, target in zip(source_pages, target_pages, strict=True):
            yield Copy(
                (begin + source) * size.page_bytes,
                (begin + target) * size.page_bytes,
                size.page_bytes,
            )


def send(
    case: str,
    transfer: NixlTransfer,
    goal: Goal,
    runs: Sequence[PageRun],
    ranges: Sequence[range],
    size: Size,
    device: torch.device,
) -> Figures:
    """Median over repeats, from the first submit to the last landing."""
    pool_bytes = size.num_layers * size.num_pages * size.page_bytes
    # Joined beforehand, as prefill workers hand them over: once for a prompt.
    parts = [
        [
            Copy(*each)
            for each in merged_ranges(
                list(copies_of(runs, goal.runs, layers, size)),
                source_bytes=pool_bytes,
                target_bytes=pool_bytes,
            )
        ]
        for layers in ranges
    ]
    descriptors = sum(map(len, parts))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = []
    for _ in range(size.repeats):
        began = time.perf_counter()
        pending = {transfer.submit(goal.agent, part, b"arrived") for part in parts}
        wait_for(lambda pending=pending: landed(transfer, pending))  # type: ignore[misc]
        seconds.append(time.perf_counter() - began)
    return Figures(case=case, seconds=statistics.median(seconds), descriptors=descriptors)


def landed(transfer: NixlTransfer, pending: set[object]) -> bool:
    for ended in transfer.poll():
        if ended.state is State.FAILED:
            raise RuntimeError(f"a transfer failed: {ended.error}")
        pending.discard(ended.transfer)
    return not pending


def receive(transfer: NixlTransfer, num_messages: int) -> None:
    """Looks until all have arrived: bytes may move only while both sides look."""
    arrived = 0

    def all_there() -> bool:
        nonlocal arrived
        arrived += len(transfer.notifications())
        return arrived >= num_messages

    wait_for(all_there)


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there after {seconds:g} s")


def check(group: EpGroup, cache: torch.Tensor, runs: Sequence[PageRun], size: Size) -> None:
    """Both ranks have the same bytes in the prompt's pages. RuntimeError otherwise."""
    pages = [page for run in runs for page in range(run.first, run.first + run.count)]
    own = cache[:, pages].flatten(1).long()
    weights = torch.arange(1, own.shape[1] + 1, device=own.device) % 8191
    sums = [int((layer * weights).sum()) for layer in own]
    told = group.exchange(sums)
    if told[0] != told[1]:
        raise RuntimeError(f"the pages of {size.prompt_tokens} tokens differ")


def main(argv: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.device_count() > 1
    parser = bench_parser(__doc__)
    add_size(parser, layers=61 if on_gpu else 4, tokens=4096, on_gpu=on_gpu)
    arguments = parser.parse_args(argv)
    size = Size.of(arguments, page_bytes=PAGE_TOKENS * 576 * 2)
    _, figures = on_all_ranks(measure, 2, size)
    run = BenchRun.begin(BENCH)
    records = []
    for one in figures:
        rate = size.prompt_bytes / one.seconds / 1e9
        goal = GOAL_GIGABYTES if on_gpu else None
        records.append(run.record(one.case, "rate", "GB/s", rate, peer=GOAL, peer_value=goal))
        records.append(run.record(one.case, "time", "ms", 1000 * one.seconds))
        records.append(run.record(one.case, "descriptors", "count", one.descriptors))
    report(records, path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
