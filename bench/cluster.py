"""The whole path, from HTTP to KV and tokens: `make bench-cluster`.

A gateway, a router, one prefill and one decode worker, a GPU each, with ten layers of DeepSeek-V3
of made-up weights; 2,048 tokens in, 256 out, 64 requests at once. Prints and records requests and
tokens a second and the percentiles of the time to the first token and between tokens; and what the
workers say of themselves: how long each phase of their start took, and of the time of decode steps
under this load the share in which the device waited between two of them. Where a second start is
to be measured, run it twice: the first compiles. `--small` is a small model on the CPU, which tells
nothing.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.ranks.deepseek_v3_config import SMALL, write_config, write_tokenizer
from bench.records import bench_parser, path_of, report
from bench.serving.local_cluster import local_cluster, router_of
from bench.serving.worker_metrics import WorkerSamples, read_workers, start_figures, waiting_share
from loadgen.load import LoadOptions, run_load
from loadgen.records import BenchRun
from loadgen.summary import Figure, summarize

BENCH = "cluster"
MODEL_NAME = "bench"
READY_SECONDS = 400.0  # on a machine that has compiled nothing yet


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    run = BenchRun.begin(BENCH, on_cpu=arguments.small)
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(
            Path(name),
            weights=arguments.weights,
            num_layers=arguments.layers,
            sizes=SMALL if arguments.small else None,
        )
        write_tokenizer(folder)
        with local_cluster(options_of(arguments, folder), READY_SECONDS) as url:
            load = LoadOptions(
                url=url,
                model=MODEL_NAME,
                concurrency=arguments.concurrency,
                num_prompts=arguments.requests,
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
            )
            before = read_workers(router_of(url))
            outcomes, seconds = asyncio.run(run_load(load))
            failed = [outcome.error for outcome in outcomes if outcome.error]
            # Workers that fail requests may be gone.
            after = [] if failed else read_workers(router_of(url))
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}\n")
        return 1
    case = (
        f"{arguments.weights}, {arguments.layers} layers, 1 prefill + 1 decode rank, "
        f"{arguments.prompt_tokens} in, {arguments.output_tokens} out, "
        f"concurrency {arguments.concurrency}"
    )
    figures = [*summarize(outcomes, seconds).figures(), *figures_of_workers(before, after)]
    records = (run.record(case, *figure) for figure in figures)
    report(records, path_of(BENCH, arguments))
    return 0


def figures_of_workers(
    before: Sequence[WorkerSamples], after: Sequence[WorkerSamples]
) -> Iterator[Figure]:
    """Read before the load and after it. What was not measured is said, not recorded."""
    for was, worker in zip(before, after, strict=True):
        yield from start_figures(worker)
        if not worker.decodes:
            continue
        share = waiting_share(was, worker)
        if share is None:
            sys.stdout.write(f"{worker.name} tells of no waits between steps: not recorded\n")
        else:
            yield Figure(f"{worker.name} waits between steps", "share", share)


def options_of(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Of `ctl up`."""
    context = arguments.prompt_tokens + arguments.output_tokens
    options = ["--model", str(folder), "--served-model-name", MODEL_NAME]
    options += ["--decode-ranks", "1", "--max-running", str(arguments.concurrency)]
    options += ["--max-model-len", str(-(-context // 64) * 64)]
    options += ["--device", "cpu" if arguments.small else "cuda"]
    for role in ("prefill", "decode"):
        options += ["--set", f"{role}.load-format=dummy"]
    for setting in arguments.set:
        options += ["--set", setting]
    return options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--weights", default="w4afp8", choices=["w4afp8", "fp8", "bf16"])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], help="ROLE.FLAG=VALUE of `ctl up`")
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
