"""Finds block sizes of `fused_moe` on this GPU: `python -m bench.tune_fused_moe [--quick]`.

For the experts of a DeepSeek-V3 rank (32, or --experts) in BF16 and FP8, and rows an expert from 1
to 1024, each way to cut both products is measured; the rows are aligned once for both, so the best
pair of one height counts. Writes kernels/tuned/DEVICE.json, shape by shape, and prints what was
gained over the defaults. --quick ends within a minute and a half.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch

from bench.compile_offline import MAX_SHARED_BYTES, compile_into_cache
from bench.kernel_cases.case import Tensors
from bench.kernel_cases.fp8_cuts import triton_cuts
from bench.kernel_cases.gpu_timing import Call
from bench.kernel_cases.tuning import Tuner, precompile, write_section
from kernels.build import fp8_gemm_blocks
from kernels.build.fp8_gemm_blocks import ALIGNED, Fp8Blocks, Fp8Choice, default_fp8_blocks
from kernels.build.fp8_scales import empty_scales
from kernels.build.tuned import Blocks, default_blocks, shape_key, table_path
from kernels.gemm import fp8_gemm_triton
from kernels.moe import fused_moe_triton

Cut: TypeAlias = Blocks | Fp8Blocks

HIDDEN, WIDTH, CHOICES = 7168, 2048, 8
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
QUICK_ROWS = (4, 32, 256)
QUICK_SECONDS, SECONDS = 45.0, 480.0
HEIGHT = 8192  # rows that a product is compiled for
DTYPES = (torch.float8_e4m3fn, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of the two products of `num_experts` experts."""

    dtype: torch.dtype
    num_experts: int
    n: int
    k: int
    gathers: bool

    @property
    def is_fp8(self) -> bool:
        return bool(self.dtype == torch.float8_e4m3fn)


def products(dtype: torch.dtype, num_experts: int) -> tuple[Product, Product]:
    up = Product(dtype=dtype, num_experts=num_experts, n=2 * WIDTH, k=HIDDEN, gathers=True)
    down = Product(dtype=dtype, num_experts=num_experts, n=HIDDEN, k=WIDTH, gathers=False)
    return up, down


def default_cut(dtype: torch.dtype, rows: int) -> Cut:
    if dtype == torch.float8_e4m3fn:
        return default_fp8_blocks(ALIGNED, rows, 2 * WIDTH, HIDDEN)
    return default_blocks(dtype, rows)


def candidates(dtype: torch.dtype, rows: int, *, quick: bool) -> Iterator[Cut]:
    """What fits into shared memory and registers and suits the rows; the default comes first."""
    if dtype == torch.float8_e4m3fn:
        yield from triton_cuts(ALIGNED, rows, 2 * WIDTH, HIDDEN)
        return
    default = default_blocks(dtype, rows)
    yield default
    for block_m in (16, 32, 64, 128):
        if block_m > max(16, 2 * rows) or block_m < min(128, rows) // 4:
            continue
        for block_n in (64, 128) if quick else (64, 128, 256):
            for block_k in (64, 128):
                for num_stages in (3, 4) if quick else (2, 3, 4, 5):
                    for num_warps in (4, 8):
                        each = Blocks(
                            block_m=block_m, block_n=block_n, block_k=block_k,
                            num_warps=num_warps, num_stages=num_stages,
                        )  # fmt: skip
                        registers = block_m * block_n / (32 * num_warps)
                        shared = num_stages * block_k * (block_m + block_n) * dtype.itemsize
                        fits = registers <= 192 and shared <= MAX_SHARED_BYTES
                        if fits and each != default:
                            yield each


def _operands(
    product: Product, num_rows: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    shape = (product.num_experts, product.n, product.k)
    make = Tensors(device)
    if not product.is_fp8:
        return make.rows(num_rows, product.k), None, make.rows(*shape), None
    x, weight = make.fp8(num_rows, product.k), make.fp8(*shape)
    scale = torch.full((shape[0], product.n // 128, product.k // 128), 0.01, device=device)
    return x, empty_scales(x).fill_(0.01), weight, scale


def call_of(
    product: Product, operands: tuple[torch.Tensor, ...], topk_idx: torch.Tensor, cut: Cut
) -> Call:
    """One product; rows that are not gathered are already where they are aligned to."""
    x, x_scale, weight, w_scale = operands
    rows = fused_moe_triton._aligned(topk_idx, product.num_experts, cut.block_m)
    if isinstance(cut, Fp8Blocks):
        num_rows = len(rows.token_of)
        return lambda: fp8_gemm_triton.aligned(
            (x[:num_rows], x_scale[:num_rows], weight, w_scale), rows.expert_of, rows.num_used,
            cut, torch.bfloat16,
        )  # fmt: skip
    return lambda: fused_moe_triton._run(x, weight, rows, cut, gathers=product.gathers)


def compile_one(job: tuple[Product, Cut]) -> None:
    product, cut = job
    topk_idx = torch.empty(64, CHOICES, device="meta", dtype=torch.int64)
    compile_into_cache(
        lambda: call_of(product, _operands(product, HEIGHT, "meta"), topk_idx, cut)()
    )


def tune(
    tuner: Tuner[Cut], dtype: torch.dtype, num_experts: int, all_rows: Sequence[int], quick: bool
) -> dict[str, dict[str, dict[str, int | str]]]:
    """Cuts by shape and rows, as `kernels.build.tuned` reads them."""
    table: dict[str, dict[str, dict[str, int | str]]] = {}
    both = products(dtype, num_experts)
    tokens = [max(1, rows * num_experts // CHOICES) for rows in all_rows]
    height = max(tokens) * CHOICES + 128 * num_experts
    operands = [_operands(product, height, "cuda") for product in both]
    for rows, num_tokens in zip(all_rows, tokens, strict=True):
        topk_idx = torch.rand(num_tokens, num_experts, device="cuda").topk(CHOICES).indices
        times = [
            tuner.times(
                candidates(dtype, rows, quick=quick),
                lambda cut, p=product, o=given, t=topk_idx: call_of(p, o, t, cut),  # type: ignore[misc]
            )
            for product, given in zip(both, operands, strict=True)
        ]
        default = default_cut(dtype, rows)
        before = times[0][default] + times[1][default]
        total, pair = best_pair(*times)
        name = str(dtype).removeprefix("torch.")
        sys.stdout.write(
            f"{name} rows {rows:5}: {total:8.1f} us, defaults {before:8.1f} us  {pair}\n"
        )
        sys.stdout.flush()
        for product, cut in zip(both, pair, strict=True):
            key, record = entry(product, cut)
            table.setdefault(key, {})[str(rows)] = record
    return table


def entry(product: Product, cut: Cut) -> tuple[str, dict[str, int | str]]:
    """Key and record in the section of the product's type."""
    if isinstance(cut, Fp8Blocks):
        key = fp8_gemm_blocks.shape_key(ALIGNED, product.n, product.k)
        return key, Fp8Choice(path="triton", blocks=cut).record()
    return shape_key(product.dtype, product.num_experts, product.n, product.k), asdict(cut)


def best_pair(up: dict[Cut, float], down: dict[Cut, float]) -> tuple[float, tuple[Cut, Cut]]:
    """Of all pairs of one height."""
    return min(
        (
            (up[one] + down[other], (one, other))
            for one in up
            for other in down
            if one.block_m == other.block_m
        ),
        key=lambda found: found[0],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune the fused experts on this GPU.")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, within a minute and a half"
    )
    parser.add_argument("--experts", type=int, default=32, help="experts of a rank")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    all_rows = QUICK_ROWS if options.quick else ROWS
    jobs = {
        (product, cut)
        for dtype in DTYPES
        for rows in all_rows
        for product in products(dtype, options.experts)
        for cut in candidates(dtype, rows, quick=options.quick)
    }
    begin = time.monotonic()
    precompile(compile_one, sorted(jobs, key=repr))
    sys.stdout.write(f"compiled {len(jobs)} kernels in {time.monotonic() - begin:.0f} s\n")
    path = table_path(torch.cuda.get_device_name())
    tuner = Tuner[Cut](QUICK_SECONDS if options.quick else SECONDS, time.monotonic)
    for dtype in DTYPES:
        table = tune(tuner, dtype, options.experts, all_rows, options.quick)
        if not options.no_write:
            section = "fp8_gemm" if dtype == torch.float8_e4m3fn else "fused_moe"
            write_section(path, section, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
