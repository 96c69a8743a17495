"""Finds how to cut Triton's FP8 products on this GPU: `python -m bench.tune_fp8_gemm [--quick]`.

For the projections of DeepSeek-V3 and several numbers of tokens, each cut of
`fp8_gemm_blocks` is measured, each call with weights that no cache holds. Prints the best
beside the default and, where it is installed, DeepGEMM; writes kernels/tuned/DEVICE.json shape by
shape: which of the two won, and Triton's best cut. --quick ends within two minutes.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import ModuleType

import torch

from bench.compile_offline import compile_into_cache
from bench.kernel_cases.case import Tensors, installed
from bench.kernel_cases.fp8_cuts import triton_cuts
from bench.kernel_cases.gpu_timing import Call, microseconds
from bench.kernel_cases.tuning import Tuner, precompile, write_section
from kernels.build.fp8_gemm_blocks import DENSE, MASKED, Fp8Blocks, Fp8Choice, shape_key
from kernels.build.fp8_scales import empty_scales
from kernels.build.tuned import table_path
from kernels.gemm import fp8_gemm_triton

NUM_EXPERTS = 32
# (layout, N, K) of DeepSeek-V3, those of most time first.
SHAPES = (
    (DENSE, 24576, 1536), (DENSE, 7168, 16384), (DENSE, 2112, 7168), (DENSE, 4096, 7168),
    (DENSE, 7168, 2048), (MASKED, 4096, 7168), (MASKED, 7168, 2048), (DENSE, 36864, 7168),
    (DENSE, 7168, 18432),
)  # fmt: skip
ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
QUICK_ROWS = (1, 16, 32, 64, 128, 256, 4096)
MAX_MASKED_ROWS = 512  # of each expert
QUICK_SECONDS, SECONDS = 90.0, 480.0
ROTATED_BYTES = 160e6  # of weights that take turns: three times the second-level cache
# The best of many candidates looks a little better than it is.
MARGIN = 0.98

Job = tuple[int, int, int, int, Fp8Blocks]  # layout, N, K, rows, cut
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Product = Callable[[Operands], object]


def operands_of(rows: int, weight: torch.Tensor, w_scale: torch.Tensor) -> Operands:
    *lead, _, k = weight.shape
    x = Tensors(weight.device.type).fp8(*lead, rows, k)
    return x, empty_scales(x).fill_(0.01), weight, w_scale


def weights_of(layout: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (NUM_EXPERTS,) if layout == MASKED else ()
    weight = Tensors(device).fp8(*lead, n, k)
    return weight, torch.full((*lead, -(-n // 128), k // 128), 0.01, device=device)


def product_of(layout: int, rows: int, blocks: Fp8Blocks, device: str) -> Product:
    if layout == DENSE:
        return lambda operands: fp8_gemm_triton.dense(operands, blocks=blocks)
    counts = torch.full((NUM_EXPERTS,), rows, dtype=torch.int32, device=device)
    return lambda operands: fp8_gemm_triton.masked(operands, counts, rows, blocks=blocks)


def deep_gemm_product(deep_gemm: ModuleType, layout: int, sample: Operands) -> Product:
    x, _, weight, _ = sample
    out = x.new_empty(*x.shape[:-1], weight.shape[-2], dtype=torch.bfloat16)
    if layout == DENSE:
        return lambda given: deep_gemm.fp8_gemm_nt(given[:2], given[2:], out)
    rows = x.shape[1]
    counts = torch.full((NUM_EXPERTS,), rows, dtype=torch.int32, device=x.device)
    return lambda given: deep_gemm.fp8_m_grouped_gemm_nt_masked(
        given[:2], given[2:], out, counts, rows
    )


def taking_turns(product: Product, operands: Sequence[Operands]) -> Call:
    """Each call takes the next operands, all of which have been used once."""
    for each in operands:
        product(each)
    turns = itertools.cycle(operands)
    return lambda: product(next(turns))


def compile_one(job: Job) -> None:
    layout, n, k, rows, blocks = job
    operands = operands_of(rows, *weights_of(layout, n, k, "meta"))
    compile_into_cache(lambda: product_of(layout, rows, blocks, "meta")(operands))


def tune_shape(
    tuner: Tuner[Fp8Blocks], layout: int, n: int, k: int, all_rows: Sequence[int]
) -> dict[str, dict[str, int | str]]:
    """The winner and the best cut by rows."""
    best: dict[str, dict[str, int | str]] = {}
    deep_gemm = installed("deep_gemm")
    num_bytes = (NUM_EXPERTS if layout == MASKED else 1) * n * k
    weights = [
        weights_of(layout, n, k, "cuda") for _ in range(max(1, round(ROTATED_BYTES / num_bytes)))
    ]
    calls = max(3, len(weights))
    for rows in all_rows:
        sets = [operands_of(rows, *each) for each in weights]
        cuts = list(triton_cuts(layout, rows, n, k))

        def call_of(blocks: Fp8Blocks, rows: int = rows, sets: Sequence[Operands] = sets) -> Call:
            return taking_turns(product_of(layout, rows, blocks, "cuda"), sets)

        times = tuner.times(cuts, call_of, calls)
        chosen = min(times, key=lambda blocks: times[blocks])
        line = f"{shape_key(layout, n, k):26} rows {rows:5}: {times[chosen]:8.1f} us, default"
        line += f" {times.get(cuts[0], float('nan')):8.1f} us"
        path = "deep_gemm"
        if deep_gemm:
            peer = microseconds(
                taking_turns(deep_gemm_product(deep_gemm, layout, sets[0]), sets), calls
            )
            path = "triton" if times[chosen] < MARGIN * peer else path
            line += f", DeepGEMM {peer:8.1f} us ({peer / times[chosen]:.2f})"
        values = " ".join(str(int(value)) for value in asdict(chosen).values())
        sys.stdout.write(f"{line}  {path:9} {values}\n")
        sys.stdout.flush()
        best[str(rows)] = Fp8Choice(path=path, blocks=chosen).record()
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune Triton's FP8 products on this GPU.")
    parser.add_argument(
        "--quick", action="store_true", help="few numbers of tokens, within two minutes"
    )
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    all_rows = QUICK_ROWS if options.quick else ROWS
    # Sizes are arguments of a compiled kernel: one shape of a layout stands for the others.
    jobs: dict[tuple[int, Fp8Blocks], Job] = {}
    for layout, n, k in SHAPES:
        for rows in all_rows:
            for blocks in triton_cuts(layout, rows, n, k):
                # Nor does the number of splits, if there are several.
                kernel = replace(blocks, splits=min(2, blocks.splits))
                jobs.setdefault((layout, kernel), (layout, n, k, rows, kernel))
    begin = time.monotonic()
    precompile(compile_one, list(jobs.values()))
    sys.stdout.write(f"compiled {len(jobs)} kernels in {time.monotonic() - begin:.0f} s\n")
    tuner = Tuner[Fp8Blocks](QUICK_SECONDS if options.quick else SECONDS, time.monotonic)
    path = table_path(torch.cuda.get_device_name())
    for layout, n, k in SHAPES:
        rows_of = [rows for rows in all_rows if layout == DENSE or rows <= MAX_MASKED_ROWS]
        table = tune_shape(tuner, layout, n, k, rows_of)
        if not options.no_write:
            write_section(path, "fp8_gemm", {shape_key(layout, n, k): table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
