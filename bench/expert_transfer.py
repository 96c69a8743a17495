"""Experts that move between ranks at full size: `python -m bench.expert_transfer --record`.

Ranks without a model: layers of experts as large as DeepSeek-V3's (FP8: 44 MB each), and steps that
read a part of them as decoding does. All slots are shuffled over all ranks. Taken are the time of a
step before, during and after, how long the layers take, and bytes a second of all ranks together.
Every slot is checked afterwards. One rank a GPU; without GPUs, sockets and a smaller size.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.ranks.ep_ranks import on_all_ranks
from bench.records import bench_parser, path_of, report
from ep.dispatch.expert_shard import ExpertShard, make_dispatcher
from ep.group.group import EpGroup
from ep.migration.migration import ExpertMigration
from ep.migration.migration_state import Outcome, Report
from ep.placement.expert_slots import ExpertSlots
from ep.placement.placement import EMPTY, Placement
from loadgen.records import BenchRun, Record
from loadgen.summary import percentile

BENCH = "expert_transfer"
EXPERT_BYTES = 3 * 7168 * 2048  # gate, up and down in FP8
NUM_STEPS = 200  # before, and again after
READ_SHARE = 8  # one expert in so many is read by a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    ranks: int
    layers: int
    slots: int  # a rank
    experts: int  # a layer
    expert_bytes: int
    bytes_per_second: float


@dataclass
class Figures:
    """Seconds of steps, in order; of the migration; bytes that came here."""

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_bytes: int = 0


class Rank:
    def __init__(self, group: EpGroup, size: Size, device: torch.device) -> None:
        self._group = group
        self._device = device
        placement = Placement.trivial(
            size.layers, size.experts, size.ranks, size.ranks * size.slots - size.experts
        )
        dispatcher = make_dispatcher(group, size.slots)
        shard = ExpertShard.build(placement, group.rank, dispatcher, device)
        self._weights = [
            torch.empty(size.slots, size.expert_bytes // 8, dtype=torch.int64, device=device)
            for _ in range(size.layers)
        ]
        for layer, weights in enumerate(self._weights):
            for slot, expert in enumerate(placement.local_experts(layer, group.rank)):
                weights[slot] = _mark(layer, expert)
        self.migration = ExpertMigration(
            group,
            shard,
            [ExpertSlots([weights]) for weights in self._weights],
            _no_checkpoint,
            bytes_per_second=size.bytes_per_second,
        )

    def step(self) -> tuple[float, bool]:
        """Seconds, and whether a migration has ended."""
        began = time.perf_counter()
        facts = self._group.exchange([*map(int, self.migration.report)])
        ended = self.migration.at_boundary([Report(num, bool(bad)) for num, bad in facts])
        if ended is not None and ended.outcome is not Outcome.DONE:
            raise RuntimeError(f"the migration failed: {ended}")
        for weights in self._weights:
            weights[:: max(1, len(weights) // READ_SHARE)].sum()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began, ended is not None

    def check(self, placement: Placement) -> None:
        for layer, weights in enumerate(self._weights):
            for slot, expert in enumerate(placement.local_experts(layer, self._group.rank)):
                if expert != EMPTY and not bool((weights[slot] == _mark(layer, expert)).all()):
                    raise RuntimeError(f"layer {layer}, slot {slot} does not hold expert {expert}")


def _mark(layer: int, expert: int) -> int:
    return layer * 1_000_003 + expert * 7 + 1


def _no_checkpoint(_layer: int, _expert: int, _row: torch.Tensor) -> None:
    raise RuntimeError("a transfer failed, and there is no checkpoint here")


def measure(group: EpGroup, device: torch.device, size: Size) -> Figures:
    """On every rank at once."""
    bench = Rank(group, size, device)
    figures = Figures()
    for _ in range(20):
        bench.step()
    figures.before = [bench.step()[0] for _ in range(NUM_STEPS)]
    target = shuffled(bench.migration.placement)
    began = time.perf_counter()
    bench.migration.begin(target)
    ended = False
    while not ended:
        seconds, ended = bench.step()
        figures.during.append(seconds)
    figures.seconds = time.perf_counter() - began
    figures.num_bytes = bench.migration.progress.num_bytes
    figures.after = [bench.step()[0] for _ in range(NUM_STEPS)]
    bench.check(target)
    return figures


def shuffled(placement: Placement) -> Placement:
    rng = random.Random(1)  # the same on all ranks
    return placement.with_layers(
        {
            layer: tuple(rng.sample(slots, len(slots)))
            for layer, slots in enumerate(placement.physical_to_logical)
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    num_gpus = torch.cuda.device_count()
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=num_gpus or 2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=36 if num_gpus else 4, help="a rank")
    parser.add_argument("--expert-bytes", type=int, default=EXPERT_BYTES if num_gpus else 1 << 20)
    parser.add_argument("--bytes-per-second", type=float, default=1e12, help="a rank may send")
    arguments = parser.parse_args(argv)
    size = Size(
        ranks=arguments.ranks,
        layers=arguments.layers,
        slots=arguments.slots,
        experts=arguments.ranks * arguments.slots * 8 // 9,
        expert_bytes=arguments.expert_bytes,
        bytes_per_second=arguments.bytes_per_second,
    )
    found = on_all_ranks(measure, size.ranks, size)
    report(records(BenchRun.begin(BENCH), size, found), path_of(BENCH, arguments))
    return 0


def records(run: BenchRun, size: Size, found: Sequence[Figures]) -> list[Record]:
    case = (
        f"{size.ranks} ranks, {size.layers} layers of {size.ranks * size.slots} slots, "
        f"{size.expert_bytes / 1e6:.0f} MB an expert"
    )
    seconds = max(figures.seconds for figures in found)
    num_bytes = sum(figures.num_bytes for figures in found)
    before = [one for figures in found for one in figures.before]
    made = [
        run.record(case, "migration", "s", seconds),
        run.record(case, "moved", "GB/s", num_bytes / seconds / 1e9),
    ]
    for name in ("before", "during", "after"):
        steps = [one for figures in found for one in getattr(figures, name)]
        for at in (50, 99):
            made.append(
                run.record(
                    f"{case}, {name}",
                    f"step_p{at}",
                    "s",
                    percentile(steps, at),
                    peer="before",
                    peer_value=None if name == "before" else percentile(before, at),
                )
            )
    return made


if __name__ == "__main__":
    sys.exit(main())
