"""Finds where the CUDA kernel for few tokens is the fastest FP8 product on this GPU, and how to cut
it there, after `bench.tune_fp8_gemm`:

    python -m bench.tune_fp8_clusters              all shapes
    python -m bench.tune_fp8_clusters n2112 n4096  those of so many columns

A shape is compiled, measured and written before the next one begins: where a run ends too early,
another one goes on with the others.

Measures each cut of `fp8_gemm_clusters` for the dense projections of DeepSeek-V3 beside
DeepGEMM, where it is installed, and Triton's best cut, each call with weights that no cache holds.
Prints the times; writes into kernels/tuned/DEVICE.json which of the three won, and the best cut
where it beats Triton's.
"""

import argparse
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch

from bench.kernel_cases.case import installed
from bench.kernel_cases.fp8_cuts import cluster_cuts
from bench.kernel_cases.gpu_timing import Call, microseconds
from bench.kernel_cases.tuning import Tuner, precompile, write_section
from bench.tune_fp8_gemm import (
    MARGIN,
    ROTATED_BYTES,
    SHAPES,
    Job,
    Operands,
    compile_one,
    deep_gemm_product,
    operands_of,
    product_of,
    taking_turns,
    weights_of,
)
from kernels.ahead.deep_gemm_ahead import Product, compile_ahead
from kernels.build.fp8_gemm_blocks import DENSE, Fp8Blocks, Fp8Choice, default_fp8_blocks, shape_key
from kernels.build.fp8_gemm_clusters import HEIGHTS, MAX_ROWS, ClusterBlocks
from kernels.build.tuned import fp8_table, table_path
from kernels.gemm import fp8_gemm_cuda

ROWS = (1, *HEIGHTS)
SECONDS = 8.0  # that a shape's cuts are measured for
PROCESSES = 16  # that compile DeepGEMM's kernels


def tune_shape(
    tuner: Tuner[ClusterBlocks], n: int, k: int, known: Mapping[int, Fp8Choice]
) -> dict[int, Fp8Choice]:
    """What is `known` of a shape, by rows, with the CUDA kernel's best cuts beside it."""
    deep_gemm = installed("deep_gemm")
    weights = [weights_of(DENSE, n, k, "cuda") for _ in range(max(1, round(ROTATED_BYTES / n / k)))]
    calls = max(3, len(weights))
    found = dict(known)
    for rows in rows_of(known):
        sets = [operands_of(rows, *each) for each in weights]

        def call_of(blocks: ClusterBlocks, sets: Sequence[Operands] = sets) -> Call:
            return taking_turns(lambda given: fp8_gemm_cuda.dense(given, blocks=blocks), sets)

        times = tuner.times(cluster_cuts(rows, n, k), call_of, calls)
        clusters = min(times, key=lambda blocks: times[blocks])
        blocks = _nearest(known, rows, n, k).blocks
        triton = product_of(DENSE, rows, blocks, "cuda")
        paths = {"cuda": times[clusters], "triton": microseconds(taking_turns(triton, sets), calls)}
        if deep_gemm:
            product = deep_gemm_product(deep_gemm, DENSE, sets[0])
            paths["deep_gemm"] = microseconds(taking_turns(product, sets), calls)
        found[rows] = choice_of(paths, blocks, clusters)
        line = f"{shape_key(DENSE, n, k):26} rows {rows:4}:"
        line += "".join(f" {path} {time:8.1f} us" for path, time in paths.items())
        values = " ".join(str(value) for value in asdict(clusters).values())
        sys.stdout.write(f"{line}  {found[rows].path:9} {values}\n")
        sys.stdout.flush()
    return found


def rows_of(known: Collection[int]) -> list[int]:
    """Those that the kernel differs in, and others that have an entry, which would be in front."""
    return sorted({*ROWS, *(rows for rows in known if rows <= MAX_ROWS)})


def choice_of(paths: Mapping[str, float], blocks: Fp8Blocks, clusters: ClusterBlocks) -> Fp8Choice:
    """By the microseconds of each path, of which "deep_gemm" may be missing; best cuts look a
    little better than they are."""
    is_faster = paths["cuda"] < MARGIN * paths["triton"]
    path = "cuda" if is_faster else "triton"
    if MARGIN * paths.get("deep_gemm", math.inf) <= paths[path]:
        path = "deep_gemm"
    return Fp8Choice(path=path, blocks=blocks, clusters=clusters if is_faster else None)


def _compile_ahead(n: int, k: int, device: torch.device) -> None:
    """What is compared with: DeepGEMM's kernels one after the other would take minutes."""
    products: list[Product] = []
    jobs: list[Job] = []
    known = _known(device, n, k)
    for rows in rows_of(known):
        products.append(Product(DENSE, experts=0, n=n, k=k, rows=rows, expected_rows=0))
        jobs.append((DENSE, n, k, rows, _nearest(known, rows, n, k).blocks))
    if installed("deep_gemm"):
        compile_ahead(products, device, num_processes=PROCESSES)
    precompile(compile_one, jobs)


def _known(device: torch.device, n: int, k: int) -> Mapping[int, Fp8Choice]:
    return fp8_table(device).get(shape_key(DENSE, n, k), {})


def _nearest(known: Mapping[int, Fp8Choice], rows: int, n: int, k: int) -> Fp8Choice:
    if not known:
        return Fp8Choice(path="deep_gemm", blocks=default_fp8_blocks(DENSE, rows, n, k))
    return known[min(known, key=lambda measured: (abs(measured - rows), measured))]


def shapes_of(names: Collection[str]) -> list[tuple[int, int]]:
    """(N, K) of the dense projections whose columns are named, "n2112"; of all where none is."""
    return [
        (n, k) for layout, n, k in SHAPES if layout == DENSE and (not names or f"n{n}" in names)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    columns = sorted({f"n{n}" for n, _ in shapes_of(())})
    parser = argparse.ArgumentParser(description="Tune FP8 products of few tokens on this GPU.")
    parser.add_argument("columns", nargs="*", help=f"of {', '.join(columns)} (all)")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    unknown = set(options.columns) - set(columns)
    if unknown:
        parser.error(f"no shape has {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    path = table_path(torch.cuda.get_device_name())
    for n, k in shapes_of(options.columns):
        _compile_ahead(n, k, device)
        tuner = Tuner[ClusterBlocks](SECONDS, time.monotonic)
        choices = tune_shape(tuner, n, k, _known(device, n, k))
        if not options.no_write:
            table = {str(rows): choice.record() for rows, choice in choices.items()}
            write_section(path, "fp8_gemm", {shape_key(DENSE, n, k): table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
