"""What answers feel of experts that move: `python -m bench.rebalance --record`.

A cluster on this machine with four decode ranks and redundant experts, under constant load. The
time between tokens is taken without anything else and while one rebalance follows the other, each
to a placement that has nothing to do with the last; several times in turn, so that whatever else
the machine does falls on both alike. Every stream is compared with its first, undisturbed answer.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.records import bench_parser, path_of, report, say
from bench.serving.local_cluster import local_cluster, router_of
from ctl.admin.connection import AdminConnection, connect
from ctl.admin.connection import Target as RouterTarget
from loadgen.openai_stream import Streamed, Target, stream
from loadgen.records import BenchRun, Record
from loadgen.summary import percentile
from proto import experts_pb2, router_pb2

BENCH = "rebalance"
MODEL_PATH = "/v1/completions"
PROMPT_TOKENS = 32
SETTLE_SECONDS = 2.0


@dataclass
class Observation:
    """Seconds between tokens of all streams, as they came; when it was (`time.perf_counter`), and
    what moved meanwhile."""

    gaps: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    num_rebalances: int = 0
    num_bytes: int = 0
    moving_seconds: float = 0.0


class Clients:
    """So many streams at any time, each asking the same again and again."""

    def __init__(self, target: Target, model: str, num_streams: int, num_tokens: int) -> None:
        self._target = target
        self._bodies = [
            {
                "model": model,
                "prompt": [7 + (number * 31 + place * 17) % 700 for place in range(PROMPT_TOKENS)],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            for number in range(num_streams)
        ]
        self._texts: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        self.done: list[Streamed] = []
        self.num_different = 0

    async def learn(self) -> None:
        """Undisturbed answers."""
        replies = await asyncio.gather(*map(self._ask, self._bodies))
        self._texts = [reply.text for reply in replies]

    def begin(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep_asking(number)) for number in range(len(self._bodies))
        ]

    async def end(self) -> None:
        """Waits for the streams that are open. Raises StreamError where one failed."""
        self._over = True
        await asyncio.gather(*self._tasks)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between tokens that came within, of streams that are over."""
        return [
            after - before
            for reply in self.done
            for before, after in zip(reply.token_times, reply.token_times[1:], strict=False)
            if begin <= before and after <= end
        ]

    async def _ask(self, body: dict[str, object]) -> Streamed:
        return await stream(self._target, MODEL_PATH, body, {})

    async def _keep_asking(self, number: int) -> None:
        while not self._over:
            reply = await self._ask(self._bodies[number])
            self.num_different += reply.text != self._texts[number]
            self.done.append(reply)


class Rebalancer:
    """Through the router, as an operator would."""

    def __init__(self, admin: AdminConnection) -> None:
        self._admin = admin
        self._rng = random.Random(1)

    async def once(self, phase: Observation) -> None:
        load = await self._admin.call(
            self._admin.stub.GetExpertLoad, router_pb2.GroupExpertLoadRequest()
        )
        plan = experts_pb2.RebalancePlan(placement_version=load.placement_version)
        for layer in load.layers:
            slots = list(layer.physical_to_logical)
            self._rng.shuffle(slots)
            plan.layers.add(layer=layer.layer, physical_to_logical=slots)
        request = router_pb2.GroupApplyRequest(apply=experts_pb2.ApplyRequest(plan=plan))
        last = experts_pb2.RebalanceProgress()
        async for progress in self._admin.stream(self._admin.stub.ApplyRebalance, request):
            last = progress
        phase.num_rebalances += 1
        phase.num_bytes += last.num_bytes_done
        phase.moving_seconds += last.seconds


async def measure(
    url: str, router: str, model: str, arguments: argparse.Namespace
) -> tuple[dict[str, Observation], int]:
    """Phases by name, and how many answers were not what they should have been."""
    clients = Clients(Target.parse(url), model, arguments.streams, arguments.tokens)
    await clients.learn()
    phases = {name: Observation() for name in ("quiet", "moving")}
    async with connect(RouterTarget(router=router)) as admin:
        rebalancer = Rebalancer(admin)
        clients.begin()
        for _ in range(arguments.rounds):
            for name, phase in phases.items():
                await asyncio.sleep(SETTLE_SECONDS)
                began = time.perf_counter()
                if name == "quiet":
                    await asyncio.sleep(arguments.seconds)
                else:
                    for _ in range(arguments.rebalances):
                        await rebalancer.once(phase)
                phase.spans.append((began, time.perf_counter()))
        await clients.end()
    for phase in phases.values():
        phase.gaps = [gap for span in phase.spans for gap in clients.gaps(*span)]
    return phases, clients.num_different


def records(run: BenchRun, phases: dict[str, Observation], case: str) -> list[Record]:
    found = []
    quiet = phases["quiet"].gaps
    for name, phase in phases.items():
        for at in (50, 99):
            found.append(
                run.record(
                    f"{case}, {name}",
                    f"inter_token_latency_p{at}",
                    "s",
                    percentile(phase.gaps, at),
                    peer="the same without rebalances",
                    peer_value=None if name == "quiet" else percentile(quiet, at),
                )
            )
    moving = phases["moving"]
    seconds = moving.moving_seconds / moving.num_rebalances
    found.append(run.record(f"{case}, moving", "rebalance_mean", "s", seconds))
    rate = moving.num_bytes / moving.moving_seconds / 1e9
    found.append(run.record(f"{case}, moving", "moved", "GB/s", rate))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="decode ranks")
    parser.add_argument("--redundant", type=int, default=8, help="redundant experts a layer")
    parser.add_argument("--streams", type=int, default=8, help="at any time")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--seconds", type=float, default=8.0, help="of quiet in each round")
    parser.add_argument("--rebalances", type=int, default=10, help="in a row, in each round")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args(argv)
    options = ["--decode-ranks", str(arguments.ranks)]
    options += ["--set", f"decode.num-redundant-experts={arguments.redundant}"]
    with local_cluster(options) as url:
        phases, num_different = asyncio.run(measure(url, router_of(url), "demo", arguments))
    case = f"{arguments.ranks} ranks, {arguments.streams} streams, {arguments.rebalances} in a row"
    report(records(BenchRun.begin(BENCH), phases, case), path_of(BENCH, arguments))
    say(f"answers that differ: {num_different}")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
