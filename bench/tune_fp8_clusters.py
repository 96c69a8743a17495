"""Finds where the CUDA kernel for few tokens is the fastest FP8 product on this GPU, and how to cut
it there: `python -m bench.tune_fp8_clusters`, behind `bench.tune_fp8_gemm`, within a minute.

Measures each cut of `kernels.fp8_gemm_clusters` for the dense projections of DeepSeek-V3 beside
DeepGEMM, where it is installed, and Triton's best cut, each call with weights that no cache holds.
Prints the times; the cut is written into kernels/tuned/DEVICE.json where it wins, and removed where
it does not.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch

from bench.gpu_timing import Call, microseconds
from bench.tune_fp8_gemm import (
    MARGIN,
    ROTATED_BYTES,
    SHAPES,
    Operands,
    deep_gemm_product,
    operands_of,
    product_of,
    taking_turns,
    weights_of,
)
from bench.tuning import Tuner
from kernels import fp8_gemm_cuda
from kernels.fp8_gemm_blocks import DENSE, Fp8Choice, default_fp8_blocks, shape_key
from kernels.fp8_gemm_clusters import HEIGHTS, ClusterBlocks, candidates
from kernels.tuned import fp8_table, table_path, write_section

ROWS = (1, *HEIGHTS)
SECONDS = 60.0


def tune_shape(
    tuner: Tuner[ClusterBlocks], n: int, k: int, known: Mapping[int, Fp8Choice]
) -> dict[int, Fp8Choice]:
    """What is `known` of a shape, by rows, with the CUDA kernel's best cut where that is faster."""
    deep_gemm = _deep_gemm()
    weights = [weights_of(DENSE, n, k, "cuda") for _ in range(max(1, round(ROTATED_BYTES / n / k)))]
    calls = max(3, len(weights))
    found = dict(known)
    for rows in ROWS:
        sets = [operands_of(DENSE, rows, *each) for each in weights]

        def call_of(blocks: ClusterBlocks, sets: Sequence[Operands] = sets) -> Call:
            return taking_turns(lambda given: fp8_gemm_cuda.dense(*given, blocks=blocks), sets)

        times = tuner.times(candidates(rows, n, k), call_of, calls)
        chosen = min(times, key=lambda blocks: times[blocks])
        choice = _nearest(known, rows, n, k)
        triton = product_of(DENSE, rows, choice.blocks, "cuda")
        peers = {"Triton": microseconds(taking_turns(triton, sets), calls)}
        if deep_gemm:
            product = deep_gemm_product(deep_gemm, DENSE, sets[0])
            peers["DeepGEMM"] = microseconds(taking_turns(product, sets), calls)
        wins = times[chosen] < MARGIN * min(peers.values())
        line = f"{shape_key(DENSE, n, k):26} rows {rows:4}: {times[chosen]:8.1f} us"
        line += "".join(f", {name} {peer:8.1f} us" for name, peer in peers.items())
        values = " ".join(str(value) for value in chosen.record().values())
        sys.stdout.write(f"{line}  {'cuda' if wins else '':4} {values}\n")
        sys.stdout.flush()
        found[rows] = replace(choice, clusters=chosen if wins else None)
    return found


def _deep_gemm() -> ModuleType | None:
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return None


def _nearest(known: Mapping[int, Fp8Choice], rows: int, n: int, k: int) -> Fp8Choice:
    if not known:
        return Fp8Choice(path="deep_gemm", blocks=default_fp8_blocks(DENSE, rows, n, k))
    return known[min(known, key=lambda measured: (abs(measured - rows), measured))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune FP8 products of few tokens on this GPU.")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    path = table_path(torch.cuda.get_device_name())
    tuner = Tuner[ClusterBlocks](SECONDS, time.monotonic)
    for layout, n, k in SHAPES:
        if layout != DENSE:
            continue
        known = fp8_table(device).get(shape_key(DENSE, n, k), {})
        choices = tune_shape(tuner, n, k, known)
        if not options.no_write:
            table = {str(rows): choice.record() for rows, choice in choices.items()}
            write_section(path, "fp8_gemm", {shape_key(DENSE, n, k): table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
