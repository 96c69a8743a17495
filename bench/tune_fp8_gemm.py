"""Finds how to cut Triton's FP8 products on this GPU: `python -m bench.tune_fp8_gemm [--quick]`.

For the projections of DeepSeek-V3 and several numbers of tokens, each cut of
`kernels.fp8_gemm_blocks` is measured. Prints the best beside the default and, where it is
installed, DeepGEMM; writes kernels/tuned/DEVICE.json shape by shape. --quick ends within a minute.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from types import ModuleType

import torch

from bench.compile_offline import compiled
from bench.gpu_timing import Call, microseconds
from bench.tuning import Tuner, fp8, precompile
from kernels import fp8_gemm_triton
from kernels.fp8_gemm_blocks import DENSE, MASKED, Fp8Blocks, candidates, shape_key
from kernels.quantise import empty_scales
from kernels.tuned import table_path, write_section

NUM_EXPERTS = 32
# (layout, N, K) of DeepSeek-V3, the largest first.
SHAPES = (
    (DENSE, 7168, 16384), (DENSE, 24576, 1536), (DENSE, 2112, 7168), (DENSE, 4096, 7168),
    (DENSE, 7168, 2048), (DENSE, 36864, 7168), (DENSE, 7168, 18432),
    (MASKED, 4096, 7168), (MASKED, 7168, 2048),
)  # fmt: skip
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
QUICK_SHAPES, QUICK_ROWS = SHAPES[:2], (16, 64, 4096)
QUICK_SECONDS, SECONDS = 40.0, 480.0

Job = tuple[int, int, int, int, Fp8Blocks]  # layout, N, K, rows, cut
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands_of(layout: int, n: int, k: int, rows: int, device: str) -> Operands:
    lead = (NUM_EXPERTS,) if layout == MASKED else ()
    if device == "meta":
        x, weight = (
            torch.empty(*lead, size, k, device=device, dtype=torch.float8_e4m3fn)
            for size in (rows, n)
        )
    else:
        x, weight = fp8(*lead, rows, k), fp8(*lead, n, k)
    w_scale = torch.full((*lead, -(-n // 128), k // 128), 0.01, device=device)
    return x, empty_scales(x).fill_(0.01), weight, w_scale


def call_of(layout: int, operands: Operands, blocks: Fp8Blocks) -> Call:
    if layout == DENSE:
        return lambda: fp8_gemm_triton.dense(*operands, blocks=blocks)
    rows = operands[0].shape[1]
    counts = torch.full((NUM_EXPERTS,), rows, dtype=torch.int32, device=operands[0].device)
    return lambda: fp8_gemm_triton.masked(*operands, counts, rows, blocks=blocks)


def compile_one(job: Job) -> None:
    layout, n, k, rows, blocks = job
    compiled(lambda: call_of(layout, operands_of(layout, n, k, rows, "meta"), blocks)())


def deep_gemm_call(deep_gemm: ModuleType, layout: int, operands: Operands) -> Call:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(*x.shape[:-1], weight.shape[-2], dtype=torch.bfloat16)
    if layout == DENSE:
        return lambda: deep_gemm.fp8_gemm_nt((x, x_scale), (weight, w_scale), out)
    counts = torch.full((NUM_EXPERTS,), x.shape[1], dtype=torch.int32, device=x.device)
    return lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(
        (x, x_scale), (weight, w_scale), out, counts, x.shape[1]
    )


def tune_shape(
    tuner: Tuner[Fp8Blocks], layout: int, n: int, k: int, all_rows: Sequence[int]
) -> dict[str, dict[str, int]]:
    """The best cut by rows."""
    best: dict[str, dict[str, int]] = {}
    try:
        deep_gemm: ModuleType | None = importlib.import_module("deep_gemm")
    except ImportError:
        deep_gemm = None
    for rows in all_rows:
        operands = operands_of(layout, n, k, rows, "cuda")
        cuts = list(candidates(layout, rows, n, k))
        times = tuner.times(cuts, lambda blocks, o=operands: call_of(layout, o, blocks))  # type: ignore[misc]
        chosen = min(times, key=lambda blocks: times[blocks])
        line = f"{shape_key(layout, n, k):26} rows {rows:5}: {times[chosen]:8.1f} us, default"
        line += f" {times.get(cuts[0], float('nan')):8.1f} us"
        if deep_gemm:
            peer = microseconds(deep_gemm_call(deep_gemm, layout, operands), 3)
            line += f", DeepGEMM {peer:8.1f} us ({peer / times[chosen]:.2f})"
        sys.stdout.write(f"{line}  {chosen}\n")
        sys.stdout.flush()
        best[str(rows)] = chosen.record()
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune Triton's FP8 products on this GPU.")
    parser.add_argument("--quick", action="store_true", help="few shapes, within a minute")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    shapes = QUICK_SHAPES if options.quick else SHAPES
    all_rows = QUICK_ROWS if options.quick else ROWS
    # Sizes are arguments of a compiled kernel: one shape of a layout stands for the others.
    jobs: dict[tuple[int, Fp8Blocks], Job] = {}
    for layout, n, k in shapes:
        for rows in all_rows:
            for blocks in candidates(layout, rows, n, k):
                jobs.setdefault((layout, blocks), (layout, n, k, max(rows, 16), blocks))
    begin = time.monotonic()
    precompile(compile_one, list(jobs.values()))
    sys.stdout.write(f"compiled {len(jobs)} kernels in {time.monotonic() - begin:.0f} s\n")
    tuner = Tuner[Fp8Blocks](QUICK_SECONDS if options.quick else SECONDS, time.monotonic)
    path = table_path(torch.cuda.get_device_name())
    for layout, n, k in shapes:
        rows_of = [rows for rows in all_rows if layout == DENSE or rows <= 1024]
        table = tune_shape(tuner, layout, n, k, rows_of)
        if not options.no_write:
            write_section(path, "fp8_gemm", {shape_key(layout, n, k): table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
