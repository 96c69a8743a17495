"""What benches of one emulated rank have in common: flags, one model after the other, records."""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from bench.ranks.deepseek_v3_config import SMALL
from bench.ranks.emulated_rank import NUM_RANKS, EmulatedRank
from bench.records import bench_parser, path_of, report, say
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm

Measure = Callable[[EmulatedRank, BenchRun, argparse.Namespace], Iterable[Record]]


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = bench_parser(description)
    parser.add_argument("--weights", nargs="+", default=["fp8", "w4afp8", "w4afp8-static"],
                        choices=["fp8", "w4afp8", "w4afp8-static", "bf16"])  # fmt: skip
    parser.add_argument("--layers", type=int, help="fewer of them, for a quick look")
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    return parser


def measure_all(
    bench: str,
    measure: Measure,
    arguments: argparse.Namespace,
    *,
    form: AttentionForm,
    max_tokens: int,
    num_pages: int,
    mtp: bool = False,
) -> int:
    """Each format in turn: two models do not fit beside each other."""
    device = torch.device("cpu" if arguments.small else "cuda")
    run = BenchRun.begin(bench, on_cpu=arguments.small)
    for weights in arguments.weights:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            rank = EmulatedRank.load(
                Path(folder),
                weights=weights,
                device=device,
                max_tokens=max_tokens,
                num_pages=num_pages,
                form=form,
                num_layers=arguments.layers,
                sizes=SMALL if arguments.small else None,
                mtp=mtp,
            )
            say(f"{weights}: loaded in {time.monotonic() - began:.1f} s, 1 of {NUM_RANKS} ranks")
            report(measure(rank, run, arguments), path_of(bench, arguments))
            del rank
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0
