"""What clients notice of a thousand faults: `python -m bench.chaos --record`.

A cluster on this machine's CPU of two routers, two prefill and two decode workers, whose processes
reach each other through proxies. First each stream runs undisturbed; then all run again and again
while `ctl chaos` injects faults drawn from a seed. Every stream is compared with its twin; at the
end pages, tasks, descriptors and processes are compared with those of the start. A run that finds
something bad leaves the faults that led to it behind as a scenario, which --scenario plays again.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.records import bench_parser, path_of, report, say
from bench.serving.local_cluster import local_cluster, router_of
from bench.serving.twins import Tally, TwinLoad, Verdict
from bench.soak import Held, held
from core.errors import EpserveError
from ctl.admin.connection import Target as RouterTarget
from ctl.admin.connection import connect
from ctl.bench import served_model
from ctl.chaos.faults import Fault, Kind, make_schedule, read_scenario, write_scenario
from ctl.chaos.injector import Injected, Injector
from ctl.local.own_cluster import OwnCluster
from loadgen.openai_stream import Target
from loadgen.records import BenchRun, Record
from loadgen.summary import percentile
from proto.router_pb2 import GetStatusRequest, GetStatusResponse

BENCH = "chaos"
SCENARIOS = Path(__file__).parents[1] / "tests" / "scenarios" / "chaos"
# What clients are promised: no longer pause between two tokens.
LONGEST_PAUSE_SECONDS = 5.0
CLUSTER = (
    "--routers", "2", "--prefill-workers", "2", "--decode-workers", "2", "--decode-ranks", "2",
    "--threads", "1", "--kv-pages", "256", "--proxies",
)  # fmt: skip
SETTLED_SECONDS = 120.0
LOOK_SECONDS = 1.0
# Descriptors of a process that others have just opened connections to, or have not yet.
TO_AND_FRO = 6
# Before the first bad stream was over: what may have led to it.
STORY_SECONDS = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a cluster holds: `pages` that are not free, requests that are open, `held` by its
    processes, and how many these are."""

    num_pages: int
    num_open: int
    num_ready: int
    held: Held
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`leaks` in words, with how much; `started` in seconds of `time.monotonic`."""

    tally: Tally
    injected: list[Injected]
    leaks: dict[str, float]
    started: float
    seconds: float

    def problems(self) -> list[str]:
        """All that should not be."""
        unrecovered = [f"{one.fault}: {one.problem}" for one in self.injected if one.problem]
        leaks = [f"leaked: {what}: {much:g}" for what, much in self.leaks.items()]
        return [*(what for _, what in self.tally.bad), *unrecovered, *leaks]


async def footprint(url: str) -> Footprint:
    """Raises EpserveError while the router does not answer."""
    async with connect(RouterTarget(router=router_of(url))) as admin:
        status: GetStatusResponse = await admin.call(admin.stub.GetStatus, GetStatusRequest())
    ranks = [rank for worker in status.workers for rank in worker.ranks]
    return Footprint(
        num_pages=sum(rank.pages_total - rank.pages_free for rank in ranks),
        num_open=sum(rank.num_running + rank.num_waiting for rank in ranks) + status.num_waiting,
        num_ready=sum(worker.ready for worker in status.workers),
        held=await asyncio.to_thread(held, url),
        num_processes=len(psutil.Process().children(recursive=True)),
    )


def leaks(before: Footprint, after: Footprint) -> dict[str, float]:
    """What there is more of, or workers that there are fewer of."""
    found: dict[str, float] = {
        "pages": after.num_pages,
        "open requests": after.num_open,
        "missing workers": before.num_ready - after.num_ready,
        "processes": abs(after.num_processes - before.num_processes),
    }
    for name, was in before.held.items():
        now = after.held.get(name, {})
        for quantity, allowed in (("fds", TO_AND_FRO), ("tasks", TO_AND_FRO)):
            grown = now.get(quantity, 0.0) - was.get(quantity, 0.0)
            found[f"{quantity} of {name}"] = grown if grown > allowed else 0.0
    return {what: much for what, much in found.items() if much}


async def settled_leaks(url: str, before: Footprint) -> dict[str, float]:
    """Those that are still there after a while."""
    until = time.monotonic() + SETTLED_SECONDS
    while True:
        try:
            found = leaks(before, await footprint(url))
        except EpserveError as error:
            found = {f"no router: {error.message}": 1.0}
        if not found or time.monotonic() > until:
            return found
        await asyncio.sleep(LOOK_SECONDS)


async def disturb(url: str, load: TwinLoad, injector: Injector, faults: Sequence[Fault]) -> Outcome:
    """The twins, then the faults under load, then the count."""
    await load.learn()
    empty = await footprint(url)
    await settled_leaks(url, replace(empty, num_pages=0, num_open=0))
    before = await footprint(url)
    stop = asyncio.Event()
    started = time.monotonic()
    running = asyncio.create_task(load.run(stop))
    try:
        injected = await injector.run(faults, _say)
    finally:
        stop.set()
        await running
    seconds = time.monotonic() - started
    return Outcome(
        tally=load.tally,
        injected=injected,
        leaks=await settled_leaks(url, before),
        started=started,
        seconds=seconds,
    )


def _say(one: Injected) -> None:
    say(f"{one.began:8.1f} {one.over:8.1f}  {one.fault}  {one.problem}")


def story(outcome: Outcome) -> list[Fault]:
    """The faults that came before the first bad stream was over, from their beginning; all where
    none was bad."""
    if not outcome.tally.bad:
        return sorted((one.fault for one in outcome.injected), key=lambda one: one.at_seconds)
    end = outcome.tally.bad[0][0] - outcome.started
    told = [one for one in outcome.injected if end - STORY_SECONDS < one.over and one.began < end]
    first = min((one.began for one in told), default=0.0)
    times = sorted(told, key=lambda one: one.began)
    return [replace(one.fault, at_seconds=round(one.began - first, 2)) for one in times]


def records(run: BenchRun, outcome: Outcome, case: str) -> Iterator[Record]:
    tally = outcome.tally
    for kind, count in sorted(Counter(one.fault.kind for one in outcome.injected).items()):
        yield run.record(case, f"faults: {kind}", "faults", count)
    yield run.record(case, "duration", "s", outcome.seconds)
    yield run.record(case, "streams", "streams", tally.verdicts[Verdict.SAME])
    yield run.record(case, "tokens", "tokens", tally.num_tokens)
    for name, waits in (("longest_pause", tally.pauses), ("first_token", tally.firsts)):
        for at in (50, 99):
            yield run.record(case, f"{name}_p{at}", "s", percentile(waits or [0.0], at))
        yield run.record(
            case, f"{name}_max", "s", max(waits, default=0.0), peer="promised",
            peer_value=LONGEST_PAUSE_SECONDS if name == "longest_pause" else None,
        )  # fmt: skip
    for verdict in Verdict:
        if verdict is not Verdict.SAME:
            yield run.record(case, verdict.value, "streams", tally.verdicts[verdict])
    yield run.record(case, "leaked", "things", sum(outcome.leaks.values()))
    unrecovered = sum(bool(one.problem) for one in outcome.injected)
    yield run.record(case, "not_recovered", "faults", unrecovered)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.5, help="faults a second, at most")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--kinds", type=Kind, nargs="+", default=[*Kind], metavar="KIND")
    parser.add_argument("--scenario", type=Path, help="play this file's faults")
    parser.add_argument("--streams", type=int, default=12, help="at any time")
    parser.add_argument("--tokens", type=int, default=200, help="of the longest answers")
    parser.add_argument("--keep", type=Path, default=SCENARIOS, help="folder of failed scenarios")
    arguments = parser.parse_args(argv)
    run = BenchRun.begin(BENCH, on_cpu=True)
    with local_cluster(CLUSTER) as url:
        outcome = asyncio.run(play(url, arguments))
    name = arguments.scenario.stem if arguments.scenario else f"seed {arguments.seed}"
    case = f"{len(outcome.injected)} faults, {name}, {arguments.streams} streams"
    report(records(run, outcome, case), path_of(BENCH, arguments))
    if problems := outcome.problems():
        say("\n".join(problems))
        if arguments.scenario is None:
            kept = arguments.keep / f"{name.replace(' ', '-')}.txt"
            arguments.keep.mkdir(parents=True, exist_ok=True)
            kept.write_text(write_scenario(story(outcome), problems[0]), encoding="utf-8")
            say(f"kept as {kept}")
    return 1 if problems else 0


async def play(url: str, arguments: argparse.Namespace) -> Outcome:
    """Raises ValueError for a scenario that this cluster cannot have."""
    injector = Injector.of(OwnCluster.find(router_of(url)))
    if arguments.scenario:
        faults = read_scenario(arguments.scenario.read_text(encoding="utf-8"))
    else:
        faults = make_schedule(
            arguments.seed, injector.layout(), count=arguments.faults, rate=arguments.rate,
            kinds=arguments.kinds,
        )  # fmt: skip
    injector.check(faults)
    load = TwinLoad(
        Target.parse(url), served_model(url, ""), seed=arguments.seed,
        num_streams=arguments.streams, num_tokens=arguments.tokens,
    )  # fmt: skip
    return await disturb(url, load, injector, faults)


if __name__ == "__main__":
    sys.exit(main())
