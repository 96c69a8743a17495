"""DeepGEMM's kernels, compiled ahead by several processes.

DeepGEMM compiles a kernel when a product first asks for it: seconds each, one after the other, and
only by computing. So the products of a start are noted first, and computed once each by other
processes, which leave their kernels in DeepGEMM's cache.

    with noted_products() as products:
        ...passes...                          # products that DeepGEMM would compute are zeros
    compile_ahead(of_all_lengths(products, device), device, num_processes=16)

Which kernel a dense product takes may change with every 64 rows: those of DeepSeek-V3 are some 40,
of which passes of 1, 2, 4, ... tokens ask for 30.

One process is `python -m kernels.ahead.deep_gemm_ahead DEVICE PARENT`, its products JSON on stdin.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from core.kernel_caches import deep_gemm_kernels
from core.log import get_logger
from core.process import die_with_parent
from kernels.build.fp8_gemm_blocks import CONTIGUOUS, DENSE, MASKED
from kernels.build.fp8_scales import GROUP, empty_scales
from kernels.gemm.fp8_gemm_choice import faster_path

log = get_logger("kernels.deep_gemm_ahead")

COMMAND = (sys.executable, "-m", "kernels.ahead.deep_gemm_ahead")
# That have the module `deep_gemm`. To ask all that are installed for it takes a second.
DISTRIBUTIONS = ("deep-gemm", "sgl-deep-gemm")
TILE_ROWS = 64  # of its smallest tile of more than 32 rows
Pair = tuple[torch.Tensor, torch.Tensor]  # values and scales


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """What DeepGEMM chooses a kernel by. `rows` of x, masked: of an expert; `experts` is 0 and
    `expected_rows` 0 where there are none."""

    layout: int
    experts: int
    n: int
    k: int
    rows: int
    expected_rows: int


class NotingLibrary:
    """Stands in for `deep_gemm`: gives zeros, keeps what it was asked for."""

    def __init__(self, products: set[Product]) -> None:
        self._products = products

    def fp8_gemm_nt(self, _: Pair, weight: Pair, out: torch.Tensor) -> None:
        self._note(DENSE, weight[0], out)

    def fp8_m_grouped_gemm_nt_masked(
        self, _: Pair, weight: Pair, out: torch.Tensor, __: torch.Tensor, expected_rows: int
    ) -> None:
        self._note(MASKED, weight[0], out, expected_rows)

    def m_grouped_fp8_gemm_nt_contiguous(
        self, _: Pair, weight: Pair, out: torch.Tensor, __: torch.Tensor, *, use_psum_layout: bool
    ) -> None:
        assert use_psum_layout
        self._note(CONTIGUOUS, weight[0], out)

    def _note(
        self, layout: int, weight: torch.Tensor, out: torch.Tensor, expected_rows: int = 0
    ) -> None:
        out.zero_()
        experts = weight.shape[0] if weight.dim() == 3 else 0
        n, k = weight.shape[-2:]
        self._products.add(Product(layout, experts, n, k, out.shape[-2], expected_rows))


def of_all_lengths(products: Collection[Product], device: torch.device) -> set[Product]:
    """These, and dense ones of each weight for all numbers of rows up to the most that were noted,
    where DeepGEMM is what computes them on `device`."""
    most: dict[tuple[int, int], int] = {}
    for each in products:
        if each.layout == DENSE:
            most[each.n, each.k] = max(most.get((each.n, each.k), 0), each.rows)
    return {*products}.union(
        Product(DENSE, 0, n, k, rows, 0)
        for (n, k), longest in most.items()
        for rows in range(TILE_ROWS, longest, TILE_ROWS)
        if faster_path(device, DENSE, rows, n, k) == "deep_gemm"
    )


@contextmanager
def noted_products() -> Iterator[set[Product]]:
    """Nothing is computed by DeepGEMM meanwhile."""
    from kernels.gemm import fp8_gemm_deep_gemm

    products: set[Product] = set()
    library = fp8_gemm_deep_gemm.library
    fp8_gemm_deep_gemm.library = NotingLibrary(products)
    try:
        yield products
    finally:
        fp8_gemm_deep_gemm.library = library


def compile_ahead(
    products: Collection[Product],
    device: torch.device,
    *,
    num_processes: int,
    command: Sequence[str] = COMMAND,
) -> None:
    """Waits until the kernels of `products` are in the cache; at once where they were left there
    before. What a process fails at is compiled when it is first needed; logged."""
    done = _marker(products)
    if not products or done.exists():
        return
    began = time.monotonic()
    parts = shares(products, num_processes)
    log.info("compiling products ahead", products=len(products), processes=len(parts))
    processes = [
        subprocess.Popen(
            [*command, str(device), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        for _ in parts
    ]
    for process, part in zip(processes, parts, strict=True):
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(json.dumps([astuple(product) for product in part]).encode())
    failed = sum(process.wait() != 0 for process in processes)
    log.info(
        "products compiled ahead",
        products=len(products),
        processes=len(parts),
        failed=failed,
        seconds=round(time.monotonic() - began, 1),
    )
    if not failed:
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def shares(products: Collection[Product], num_shares: int) -> list[list[Product]]:
    """At most so many, none empty, the same each time. Whoever computes a share finds most kernels
    in the cache, where others' were compiled before: products that may have one in common, those of
    similar numbers of rows, are spread, so that few are compiled by two at once."""
    ordered = sorted(products)
    random.Random(0).shuffle(ordered)
    bounds = [len(ordered) * share // num_shares for share in range(num_shares + 1)]
    parts = [ordered[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return [part for part in parts if part]


def compute(product: Product, device: torch.device) -> torch.Tensor:
    """Of zeros."""
    from kernels.gemm import fp8_gemm_deep_gemm

    lead = (product.experts,) if product.experts else ()
    rows = (*lead, product.rows) if product.layout == MASKED else (product.rows,)
    x = torch.zeros(*rows, product.k, dtype=torch.uint8, device=device)
    scale = empty_scales(x).zero_()
    values = torch.zeros(*lead, product.n, product.k, dtype=torch.uint8, device=device)
    w_scale = torch.zeros(*lead, -(-product.n // GROUP), product.k // GROUP, device=device)
    operands = (x.view(torch.float8_e4m3fn), scale, values.view(torch.float8_e4m3fn), w_scale)
    if product.layout == DENSE:
        return fp8_gemm_deep_gemm.dense(operands)
    if product.layout == CONTIGUOUS:
        ends = torch.zeros(product.experts, dtype=torch.int32, device=device)
        return fp8_gemm_deep_gemm.contiguous(operands, ends)
    counts = torch.zeros(product.experts, dtype=torch.int32, device=device)
    return fp8_gemm_deep_gemm.masked(operands, counts, product.expected_rows)


def _marker(products: Collection[Product]) -> Path:
    """A file that says they are all in the cache that it lies in."""
    told = [_library_version(), *(astuple(product) for product in sorted(products))]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return deep_gemm_kernels() / f"ahead-{digest}"


def _library_version() -> str:
    """Of each distribution of it that is installed; empty for none."""
    found = []
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def main(arguments: Sequence[str]) -> None:
    device, parent = torch.device(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    torch.cuda.set_device(device)
    asked: list[Any] = json.load(sys.stdin)
    for each in asked:
        compute(Product(*each), device)
        # Of all sizes there are, what is kept of each would add up, in every process.
        torch.cuda.empty_cache()
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
