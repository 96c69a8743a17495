"""Balancing experts against DeepSeek's published EPLB: `python -m bench.eplb --published FILE`.

FILE is `eplb.py` of github.com/deepseek-ai/EPLB, which is no part of this repository; without it
only our own numbers are taken. 20 load patterns (`bench.ranks.expert_loads`) on 4 clusters, 61
layers of 256 experts. For each:

    full      our balancing and theirs, on the same load
    drifting  the load drifts away under a placement that was made for it: what part of the full
              rebalance's balancedness can be had with half of its moves; and with half of the
              moves that it needs when ranks are renamed to keep what they can

Appends a record for each of these to bench/results/details/eplb.jsonl, and what they come to for
each cluster to bench/results/eplb.jsonl.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.ranks.expert_loads import DRIFTING, NUM_GROUPS, STATIC, Load, windows
from bench.records import RESULTS, report
from ep.eplb.balance import balance
from ep.eplb.balancedness import Slots, balancedness
from ep.eplb.rank_names import keep_ranks, num_new
from ep.eplb.within_budget import rebalance
from loadgen.records import BenchRun, Record, append

BENCH = "eplb"
RESULTS_FILE = RESULTS / f"{BENCH}.jsonl"
DETAILS_FILE = RESULTS / "details" / f"{BENCH}.jsonl"
EVENNESS = "mean over max"
PEER = "deepseek-ai/EPLB"
BUDGETED = "rebalance within a budget"
NUM_LAYERS, NUM_EXPERTS = 61, 256
REPEATS = 5

Published = Callable[["ClusterSizes", Load], Slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """A cluster; hierarchical balancing where the groups of experts divide by its nodes."""

    num_ranks: int
    slots_per_rank: int
    num_nodes: int

    def __str__(self) -> str:
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"{self.num_ranks} x {self.slots_per_rank} slots, {nodes}"

    @property
    def nodes_of_groups(self) -> int:
        """Nodes that groups of experts are packed into."""
        return 1 if NUM_GROUPS % self.num_nodes else self.num_nodes

    def balance(self, load: Load) -> Slots:
        return balance(
            load,
            num_ranks=self.num_ranks,
            slots_per_rank=self.slots_per_rank,
            num_nodes=self.num_nodes,
            num_groups=NUM_GROUPS,
        )

    def rebalance(self, slots: Slots, load: Load, max_moves: int) -> Slots:
        return rebalance(
            slots, load, max_moves=max_moves, num_nodes=self.num_nodes, num_groups=NUM_GROUPS
        )


CLUSTERS = (
    ClusterSizes(num_ranks=8, slots_per_rank=36, num_nodes=1),
    ClusterSizes(num_ranks=32, slots_per_rank=9, num_nodes=4),
    ClusterSizes(num_ranks=64, slots_per_rank=5, num_nodes=8),
    ClusterSizes(num_ranks=144, slots_per_rank=2, num_nodes=18),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Mean balancedness over the layers, ours and theirs; ours in the layer where it compares
    worst, as a multiple of theirs."""

    ours: float
    theirs: float | None
    worst_layer: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting:
    """`before` any move; `reached` and `strict` are parts of the full rebalance's balancedness,
    within a part of its `full_moves`, and of the `fewest_moves` that do the same when ranks are
    renamed to keep what they can."""

    before: float
    reached: float
    num_moves: int
    full_moves: int
    strict: float
    strict_moves: int
    fewest_moves: int


def compare_full(cluster: ClusterSizes, load: Load, published: Published | None) -> Full:
    ours = balancedness(cluster.balance(load), load)
    if published is None:
        return Full(ours=float(ours.mean()), theirs=None, worst_layer=None)
    theirs = balancedness(published(cluster, load), load)
    return Full(
        ours=float(ours.mean()),
        theirs=float(theirs.mean()),
        worst_layer=float((ours / theirs).min()),
    )


def follow_drift(cluster: ClusterSizes, before: Load, now: Load, part: float) -> Drifting:
    """With `part` of the moves that the full rebalance makes."""
    start, full = cluster.balance(before), cluster.balance(now)
    renamed = keep_ranks(start, full, cluster.nodes_of_groups)
    full_moves, fewest_moves = (int(num_new(start, each).sum()) for each in (full, renamed))
    best = balancedness(full, now).mean()
    within, strict = (
        cluster.rebalance(start, now, int(part * moves)) for moves in (full_moves, fewest_moves)
    )
    return Drifting(
        before=float(balancedness(start, now).mean()),
        reached=float(balancedness(within, now).mean() / best),
        num_moves=int(num_new(start, within).sum()),
        full_moves=full_moves,
        strict=float(balancedness(strict, now).mean() / best),
        strict_moves=int(num_new(start, strict).sum()),
        fewest_moves=fewest_moves,
    )


def load_published(file: Path) -> Published:
    """Their code as it is. ValueError where there is none."""
    spec = importlib.util.spec_from_file_location("published_eplb", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"{file} is no Python file")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch

    def published(cluster: ClusterSizes, load: Load) -> Slots:
        slots, _, _ = module.rebalance_experts(
            torch.from_numpy(load),
            cluster.num_ranks * cluster.slots_per_rank,
            NUM_GROUPS,
            cluster.num_nodes,
            cluster.num_ranks,
        )
        found: Slots = slots.numpy().reshape(-1, cluster.num_ranks, cluster.slots_per_rank)
        return found

    return published


def milliseconds(call: Callable[[], object]) -> float:
    """Of processor time, so that other work on the machine counts less."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times)


def measure(run: BenchRun, published: Published | None) -> Iterator[Record]:
    for cluster in CLUSTERS:
        for name in (*STATIC, *DRIFTING):
            before, now = windows(name, 0, NUM_LAYERS, NUM_EXPERTS)
            full = compare_full(cluster, now, published)
            case = f"{name}, {cluster}"
            yield run.record(
                case, "balancedness", EVENNESS, full.ours, peer=PEER, peer_value=full.theirs
            )
            if full.worst_layer is not None:
                yield run.record(case, "worst layer", "of theirs", full.worst_layer)
            if name not in DRIFTING:
                continue
            drifting = follow_drift(cluster, before, now, 0.5)
            yield run.record(case, "before", EVENNESS, drifting.before)
            for metric, reached, moves, full_moves in (
                ("half the moves", drifting.reached, drifting.num_moves, drifting.full_moves),
                ("half the fewest", drifting.strict, drifting.strict_moves, drifting.fewest_moves),
            ):
                yield run.record(case, metric, "of the full balancedness", reached)
                yield run.record(
                    case,
                    f"moves, {metric}",
                    "experts",
                    moves,
                    peer="full rebalance",
                    peer_value=full_moves,
                )
        yield from _speed(run, cluster, published)


def _speed(run: BenchRun, cluster: ClusterSizes, published: Published | None) -> Iterator[Record]:
    before, now = windows("jitter", 0, NUM_LAYERS, NUM_EXPERTS)
    start = cluster.balance(before)
    case = f"{NUM_LAYERS} layers of {NUM_EXPERTS}, {cluster}"
    theirs = None if published is None else milliseconds(lambda: published(cluster, now))
    ours = milliseconds(lambda: cluster.balance(now))
    yield run.record(
        case, "full rebalance", "ms of processor time", ours, peer=PEER, peer_value=theirs
    )
    yield run.record(
        case, BUDGETED, "ms of processor time", _budgeted_milliseconds(cluster, start, now)
    )
    slowest = max(
        _budgeted_milliseconds(cluster, cluster.balance(before), now)
        for before, now in (windows(name, 0, NUM_LAYERS, NUM_EXPERTS) for name in DRIFTING)
    )
    yield run.record(case, f"{BUDGETED}, slowest load", "ms of processor time", slowest)


def _budgeted_milliseconds(cluster: ClusterSizes, start: Slots, now: Load) -> float:
    """With half of the full rebalance's moves."""
    budget = int(num_new(start, cluster.balance(now)).sum()) // 2
    return milliseconds(lambda: cluster.rebalance(start, now, budget))


def summarise(run: BenchRun, records: Sequence[Record]) -> Iterator[Record]:
    """What the records of all patterns come to, cluster by cluster."""
    for cluster in CLUSTERS:
        mine = [record for record in records if record.case.endswith(f", {cluster}")]
        by_metric: dict[str, list[Record]] = {}
        for record in mine:
            by_metric.setdefault(record.metric, []).append(record)
        even = by_metric["balancedness"]
        case = f"{len(even)} loads, {cluster}"
        theirs = [record.peer_value for record in even if record.peer_value is not None]
        yield run.record(
            case,
            "balancedness",
            EVENNESS,
            statistics.fmean(record.value for record in even),
            peer=PEER,
            peer_value=statistics.fmean(theirs) if theirs else None,
        )
        if theirs:
            least = min(record.value / (record.peer_value or 1) for record in even)
            yield run.record(case, "balancedness, worst load", "of theirs", least)
            worst = min(record.value for record in by_metric["worst layer"])
            yield run.record(case, "balancedness, worst layer", "of theirs", worst)
        for metric in ("half the moves", "half the fewest"):
            reached = min(record.value for record in by_metric[metric])
            yield run.record(
                f"{len(by_metric[metric])} drifting loads, {cluster}",
                f"{metric}, worst load",
                "of the full balancedness",
                reached,
            )
        for metric in ("full rebalance", BUDGETED, f"{BUDGETED}, slowest load"):
            yield from by_metric[metric]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--published", type=Path, help="eplb.py of github.com/deepseek-ai/EPLB")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    published = None if options.published is None else load_published(options.published)
    run = BenchRun.begin(BENCH, on_cpu=True)
    records = report(measure(run, published), None if options.no_record else DETAILS_FILE)
    if not options.no_record:
        append(RESULTS_FILE, summarise(run, records))
    return 0


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main(sys.argv[1:]))
