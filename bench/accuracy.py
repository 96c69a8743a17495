"""Right answers of the demo model through whole clusters: `python -m bench.accuracy --record`.

The held-out questions of `demo_model` over HTTP, to a cluster for each format of the weights, with
and without recorded steps and with and without planning ahead; on several GPUs also with two decode
ranks, by NCCL and by DeepEP. What comes out is held against a cluster in FP32 on the CPU, asked the
same in the same run. Exit status 1 where a case loses more than it may, or does not run to its end.

DeepEP's low-latency kernels do not know the 256 values that a token of the demo model has: in
recorded steps over DeepEP they are filled up with zeros (`bench.serving.wide_checkpoint`).
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.records import bench_parser, report, say
from bench.serving.local_cluster import ClusterError, local_cluster
from bench.serving.plain_checkpoint import write_plain
from bench.serving.wide_checkpoint import write_wide
from demo_model.training.corpus import Conversation, chatter_set, evaluation_set, long_set
from demo_model.training.evaluate import Score, first_model, score, server_answerer
from demo_model.training.settings import CHECKPOINT_PATH
from loadgen.records import BenchRun, Record, append

BENCH = "accuracy"
PEER = "FP32 on CPU"
FORMATS = ("bf16", "fp8", "w4afp8")
# In points of a hundred.
MOST_LOST = {"bf16": 1.0, "fp8": 1.0, "w4afp8": 2.0}
READY_SECONDS = 400.0  # on a machine that has compiled nothing yet
CASE_SECONDS = 1200.0
LONG_TOKENS = 3600
CORES_A_CLUSTER = 3
AT_ONCE = 64  # requests

# 256 values a token become 4,096.
WIDER = 16

SWITCHES = {True: ("graphs", "overlap"), False: ("no graphs", "no overlap")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster; `options` are those of `ctl up`, `is_wide` of a model filled up with zeros."""

    name: str
    weights: str
    options: tuple[str, ...]
    num_ranks: int = 1  # of a decode worker
    is_wide: bool = False

    @property
    def model(self) -> str:
        return f"{self.weights}, wide" if self.is_wide else self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`error` is empty for a cluster that has answered everything."""

    case: Case
    score: Score | None = None
    start_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def percent(self) -> float:
        assert self.score is not None
        return 100 * self.score.num_right / self.score.num_asked


REFERENCE = Case(name="fp32, cpu", weights="fp8", options=("--device", "cpu", "--dtype", "float32"))


def cases(formats: Sequence[str], device: str, num_gpus: int, *, deep_ep: bool) -> Iterator[Case]:
    """Those first that make the others start quicker: kernels are compiled once."""
    options = ("--device", device, "--dtype", "bfloat16")
    if device == "cpu":  # nothing is recorded there
        for weights in formats:
            yield Case(name=f"{weights}, cpu", weights=weights, options=options)
        return
    for graphs, overlap in itertools.product((True, False), repeat=2):
        for weights in formats:
            yield Case(
                name=f"{weights}, cuda, {SWITCHES[graphs][0]}, {SWITCHES[overlap][1]}",
                weights=weights,
                options=(*options, "--decode-ranks", "1", *switched(graphs, overlap)),
            )
    if num_gpus < 2:
        return
    for weights in formats:
        two = (*options, "--prefill-ranks", "2", "--decode-ranks", "2")
        yield Case(
            name=f"{weights}, cuda, 2 ranks, collective, graphs, overlap",
            weights=weights,
            options=(*two, *switched(True, True), *dispatcher("collective")),
            num_ranks=2,
        )
        for graphs in (True, False) if deep_ep else ():
            yield Case(
                name=f"{weights}, cuda, 2 ranks, deep_ep, {SWITCHES[graphs][0]}, overlap",
                weights=weights,
                options=(*two, *switched(graphs, True), *dispatcher("deep_ep")),
                num_ranks=2,
                is_wide=graphs,
            )


def switched(graphs: bool, overlap: bool) -> tuple[str, ...]:
    flags = {"cuda-graph": graphs, "overlap-schedule": overlap}
    return tuple(
        word
        for name, value in flags.items()
        for word in ("--set", f"decode.{name}={str(value).lower()}")
    )


def dispatcher(name: str) -> tuple[str, ...]:
    return tuple(
        word for role in ("prefill", "decode") for word in ("--set", f"{role}.ep-dispatcher={name}")
    )


def write_folders(models: Collection[str], folder: Path, device: str) -> dict[str, Path]:
    """The demo model in each form that a case names, quantized on `device`.
    subprocess.CalledProcessError where that fails."""
    folders = {}
    for suffix in ("", ", wide"):
        wanted = [weights for weights in FORMATS if weights + suffix in models]
        if not wanted:
            continue
        shipped = CHECKPOINT_PATH
        if suffix:
            shipped = write_wide(CHECKPOINT_PATH, folder / f"fp8{suffix}", WIDER)
        for weights in wanted:
            path = folder / f"{weights}{suffix}"
            if weights == "fp8":
                path = shipped
            elif weights == "bf16":
                write_plain(shipped, path)
            else:
                quantize(shipped, path, device)
            folders[weights + suffix] = path
    return folders


def quantize(model: Path, output: Path, device: str) -> None:
    command = [sys.executable, "-m", "ctl", "quantize", "--format", "w4afp8"]
    command += ["--model", str(model), "--output", str(output), "--device", device]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def conversations_of(arguments: argparse.Namespace) -> list[Conversation]:
    return [
        *evaluation_set(arguments.questions),
        *chatter_set(arguments.chatter),
        *long_set(arguments.long, LONG_TOKENS),
    ]


def ask(case: Case, folders: Mapping[str, Path], arguments: argparse.Namespace) -> Asked:
    options = ["--model", str(folders[case.model]), "--kv-pages", str(arguments.kv_pages)]
    conversations = conversations_of(arguments)
    began = time.monotonic()
    try:
        with local_cluster([*options, *case.options], READY_SECONDS, arguments.case_seconds) as url:
            ready = time.monotonic()
            answer = server_answerer(url, first_model(url), concurrency=AT_ONCE)
            found = score(conversations, answer)
            over = time.monotonic()
    except (ClusterError, OSError) as error:
        return Asked(case=case, error=f"{type(error).__name__}: {error}")
    return Asked(case=case, score=found, start_seconds=ready - began, seconds=over - ready)


def ask_all(
    wanted: Sequence[Case], folders: Mapping[str, Path], arguments: argparse.Namespace
) -> Iterator[Asked]:
    """So many clusters at a time, each as it is over. Of those with several ranks, one: kernels
    that wait for another GPU's do so for whole turns where clusters share the GPUs."""
    over_gpus = threading.Lock()

    def ask_one(case: Case) -> Asked:
        with over_gpus if case.num_ranks > 1 else nullcontext():
            return ask(case, folders, arguments)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        for asked in as_completed([pool.submit(ask_one, case) for case in wanted]):
            yield asked.result()


def tell(asked: Asked) -> None:
    if asked.score is None:
        say(f"{asked.case.name:52} FAILED: {asked.error}")
        return
    say(
        f"{asked.case.name:52} {asked.score.num_right} of {asked.score.num_asked} right; "
        f"up in {asked.start_seconds:.0f} s, answered in {asked.seconds:.0f} s"
    )
    for miss in asked.score.misses[:2]:
        say(f"    asked {miss['asked']!r}, said {miss['reply']!r}")


def records(run: BenchRun, found: Sequence[Asked], reference: Asked) -> list[Record]:
    """Of the cases that have answered."""
    return [
        run.record(
            asked.case.name,
            "right answers",
            "%",
            asked.percent,
            peer=PEER,
            peer_value=reference.percent,
        )
        for asked in found
        if asked.score is not None
    ]


def is_enough(asked: Asked, reference: Asked) -> bool:
    return (
        asked.score is not None
        and asked.percent >= reference.percent - MOST_LOST[asked.case.weights]
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    run = BenchRun.begin(BENCH)
    offered = cases(
        arguments.weights,
        arguments.device,
        torch.cuda.device_count(),
        deep_ep=find_spec("deep_ep") is not None,
    )
    wanted = [case for case in offered if case.num_ranks in arguments.ranks]
    asked = [REFERENCE, *wanted]
    reference = None
    found: list[Asked] = []
    with tempfile.TemporaryDirectory(prefix="epserve-bench-") as name:
        folders = write_folders({case.model for case in asked}, Path(name), arguments.device)
        for one in ask_all(asked, folders, arguments):
            tell(one)
            if one.case is not REFERENCE:
                found.append(one)
            elif one.score is not None:
                reference = one
            if reference is not None and arguments.record:  # a run that is cut short keeps these
                new = found if one is reference else [one]
                append(arguments.results / f"{BENCH}.jsonl", records(run, new, reference))
    if reference is None:
        return 1
    report(records(run, found, reference), None)
    lost = [asked.case.name for asked in found if not is_enough(asked, reference)]
    if lost:
        say(f"too few right: {'; '.join(lost)}")
    return 1 if lost else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    num_cores = len(os.sched_getaffinity(0))
    parser = bench_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"],
                        default="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    parser.add_argument("--weights", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2],
                        help="only clusters with so many decode ranks")  # fmt: skip
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--chatter", type=int, default=300, help="prompts that ask for no sum")
    parser.add_argument("--long", type=int, default=100, help=f"after {LONG_TOKENS} tokens")
    parser.add_argument("--kv-pages", type=int, default=4096, help="of a rank")
    parser.add_argument("--at-once", type=int, default=max(1, num_cores // CORES_A_CLUSTER),
                        help="clusters that run beside each other")  # fmt: skip
    parser.add_argument("--case-seconds", type=float, default=CASE_SECONDS,
                        help="a cluster that needs longer is killed and told of")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
