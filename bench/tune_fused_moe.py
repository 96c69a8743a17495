"""Finds block sizes of `kernels.fused_moe` on this GPU: `python -m bench.tune_fused_moe [--quick]`.

For the experts of a DeepSeek-V3 rank (32, or --experts) in BF16 and FP8, and rows an expert from 1
to 1024, each way to cut both products is measured; the rows are aligned once for both, so the best
pair of one height counts. Writes kernels/tuned/DEVICE.json, shape by shape, and prints what was
gained over the defaults. --quick ends within a minute.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.compile_offline import MAX_SHARED_BYTES, compile_into_cache
from bench.gpu_timing import Call
from bench.tuning import Tuner, fp8, precompile
from kernels import fused_moe_triton
from kernels.quantise import empty_scales
from kernels.tuned import Blocks, default_blocks, shape_key, table_path, write_section

HIDDEN, WIDTH, CHOICES = 7168, 2048, 8
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
QUICK_ROWS = (4, 32, 256)
QUICK_SECONDS, SECONDS = 45.0, 480.0
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


def candidates(dtype: torch.dtype, rows: int, *, quick: bool) -> Iterator[Blocks]:
    """What fits into shared memory and registers and suits the rows; the default comes first."""
    default = default_blocks(dtype, rows)
    yield default
    item = dtype.itemsize
    is_fp8 = item == 1
    for block_m in (16, 32, 64, 128):
        if block_m > max(16, 2 * rows) or block_m < min(128, rows) // 4:
            continue
        for block_n in (64, 128) if quick else (64, 128, 256):
            for block_k in (128,) if is_fp8 else (64, 128):
                for num_stages in (3, 4) if quick else (2, 3, 4, 5):
                    for num_warps in (4, 8):
                        each = Blocks(
                            block_m=block_m, block_n=block_n, block_k=block_k,
                            num_warps=num_warps, num_stages=num_stages,
                        )  # fmt: skip
                        # FP8 has the sum and the part that is scaled before it is added.
                        registers = block_m * block_n * (2 if is_fp8 else 1) / (32 * num_warps)
                        shared = num_stages * block_k * (block_m + block_n) * item
                        fits = registers <= 192 and shared <= MAX_SHARED_BYTES
                        if fits and each != default:
                            yield each


def _operands(
    product: Product, num_rows: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    shape = (product.num_experts, product.n, product.k)
    if device == "meta":
        x = torch.empty(num_rows, product.k, device=device, dtype=product.dtype)
        weight = torch.empty(shape, device=device, dtype=product.dtype)
    elif product.is_fp8:
        x, weight = fp8(num_rows, product.k), fp8(*shape)
    else:
        x = torch.randn(num_rows, product.k, device=device, dtype=product.dtype)
        weight = torch.randn(shape, device=device, dtype=product.dtype)
    if not product.is_fp8:
        return x, None, weight, None
    scale = torch.full((shape[0], product.n // 128, product.k // 128), 0.01, device=device)
    return x, empty_scales(x).fill_(0.01), weight, scale


def call_of(
    product: Product, operands: tuple[torch.Tensor, ...], topk_idx: torch.Tensor, blocks: Blocks
) -> Call:
    """One product; rows that are not gathered are already where they are aligned to."""
    x, x_scale, weight, w_scale = operands
    rows = fused_moe_triton._aligned(topk_idx, product.num_experts, blocks.block_m)
    out = x.new_empty(len(rows.token_of), product.n, dtype=torch.bfloat16)
    return lambda: fused_moe_triton._run(
        x, x_scale, weight, w_scale, out, rows, blocks, gathers=product.gathers
    )


def compile_one(job: tuple[Product, Blocks]) -> None:
    product, blocks = job
    topk_idx = torch.empty(64, CHOICES, device="meta", dtype=torch.int64)
    compile_into_cache(
        lambda: call_of(product, _operands(product, 4096, "meta"), topk_idx, blocks)()
    )


def tune(
    tuner: Tuner[Blocks], dtype: torch.dtype, num_experts: int, all_rows: Sequence[int], quick: bool
) -> dict[str, dict[str, dict[str, int]]]:
    """Blocks by shape and rows, as `kernels.tuned` reads them."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    both = products(dtype, num_experts)
    tokens = [max(1, rows * num_experts // CHOICES) for rows in all_rows]
    height = max(tokens) * CHOICES + 128 * num_experts
    operands = [_operands(both[0], max(tokens), "cuda"), _operands(both[1], height, "cuda")]
    for rows, num_tokens in zip(all_rows, tokens, strict=True):
        topk_idx = torch.rand(num_tokens, num_experts, device="cuda").topk(CHOICES).indices
        times = [
            tuner.times(
                candidates(dtype, rows, quick=quick),
                lambda blocks, p=product, o=given, t=topk_idx: call_of(p, o, t, blocks),  # type: ignore[misc]
            )
            for product, given in zip(both, operands, strict=True)
        ]
        default = default_blocks(dtype, rows)
        before = times[0][default] + times[1][default]
        total, pair = best_pair(*times)
        name = str(dtype).removeprefix("torch.")
        sys.stdout.write(
            f"{name} rows {rows:5}: {total:8.1f} us, defaults {before:8.1f} us  {pair}\n"
        )
        sys.stdout.flush()
        for product, blocks in zip(both, pair, strict=True):
            key = shape_key(dtype, num_experts, product.n, product.k)
            table.setdefault(key, {})[str(rows)] = blocks.record()
    return table


def best_pair(
    up: dict[Blocks, float], down: dict[Blocks, float]
) -> tuple[float, tuple[Blocks, Blocks]]:
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
    parser.add_argument("--quick", action="store_true", help="few shapes, within a minute")
    parser.add_argument("--experts", type=int, default=32, help="experts of a rank")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    all_rows = QUICK_ROWS if options.quick else ROWS
    jobs = {
        (product, blocks)
        for dtype in DTYPES
        for rows in all_rows
        for product in products(dtype, options.experts)
        for blocks in candidates(dtype, rows, quick=options.quick)
    }
    begin = time.monotonic()
    precompile(compile_one, sorted(jobs, key=repr))
    sys.stdout.write(f"compiled {len(jobs)} kernels in {time.monotonic() - begin:.0f} s\n")
    path = table_path(torch.cuda.get_device_name())
    tuner = Tuner[Blocks](QUICK_SECONDS if options.quick else SECONDS, time.monotonic)
    for dtype in DTYPES:
        table = tune(tuner, dtype, options.experts, all_rows, options.quick)
        if not options.no_write:
            write_section(path, "fused_moe", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
