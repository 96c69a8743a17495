"""The W4A8 grouped GEMM against DeepGEMM's FP8 one: `python -m bench.kernels_w4a8`.

Masked: 32 experts with the same number of rows each; contiguous: 8 experts x 4,096 rows; for the
two projections of a DeepSeek-V3 expert. Gated: gate and up with the activation behind them, masked,
which DeepGEMM has nothing like. Activations have a scale for each 128 columns, as those of DeepGEMM
always do, or, where a case says so, one a row, or one for all that the checkpoint gives ("static",
gated with another for what comes out). Weights are those of quantised normal matrices; cases that
say so have a -8 among them, which takes another code. A time is the median over replays of a CUDA
graph of several calls, ours and DeepGEMM's in turns, divided by their number; weights exceed the L2
cache several times over. Those that power binds, of 256 rows and more, are compared where each has
its own power, too: behind a rest, and each by itself for a second. Without DeepGEMM only our times
are taken. Appends records to bench/results/w4a8_grouped_gemm.jsonl; with `--before REVISION`, which
times the kernel of that revision in turns with the others, it only prints.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from bench.gpu_timing import (
    Call,
    Replay,
    captured,
    copy_bytes_per_second,
    in_turns,
    rested,
    sustained,
)
from bench.kernel_before import at_revision, launched
from bench.kernel_case import Tensor, Tensors
from bench.kernels_floor import W4a8Shape
from bench.records import RESULTS, Record, Run, kept
from kernels.build.cuda_kernel import CudaKernel
from kernels.moe.w4a8_grouped_gemm import (
    w4a8_grouped_gemm_contiguous,
    w4a8_grouped_gemm_gated,
    w4a8_grouped_gemm_masked,
)
from kernels.moe.w4a8_grouped_gemm_packing import GROUP, PackedWeights, pack_weights
from model.weights.dummy_checkpoint import rounded_by_largest
from model.weights.int4 import SMALLEST, pack_nibbles

BENCH = "w4a8_grouped_gemm"
RESULTS_FILE = RESULTS / f"{BENCH}.jsonl"
Scales = Literal["group", "row", "all"]
# What shares a scale of activations, and how names of such cases end.
_ENDINGS: dict[Scales, str] = {"group": "", "row": " row scales", "all": " static scale"}
_GATE_UP, _DOWN = (4096, 7168), (7168, 2048)
_NUM_EXPERTS = 32
_ROWS = (1, 4, 16, 32, 64, 128, 256)
_MIN_CAPACITY = 64
_ROWS_WITH_SMALLEST = (64, 128)
_ROWS_BY_ROW = (1, 32, 64, 128, 256)
_ROWS_STATIC = (32, 64, 128, 256)
_ROWS_GATED = (32, 64, 128, 256)
_CONTIGUOUS = (8, 4096)
_ROWS_BOUND_BY_POWER = 256
# How what power binds is compared besides.
_BY_OWN_POWER: dict[str, Callable[..., list[float]]] = {
    "time after a rest": rested,
    "sustained time": sustained,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape; `capacity` 0 for the contiguous layout."""

    num_experts: int
    rows: int
    n: int
    k: int
    capacity: int
    with_smallest: bool = False
    scales: Scales = "group"
    is_gated: bool = False

    @property
    def name(self) -> str:
        layout = "gated" if self.is_gated else "masked" if self.capacity else "contiguous"
        ending = f" with {SMALLEST}" * self.with_smallest + _ENDINGS[self.scales]
        return f"{layout} e{self.num_experts} m{self.rows} n{self.n} k{self.k}{ending}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of rows as the layout has them."""
        contiguous = (self.num_experts * self.rows,)
        return (self.num_experts, self.capacity) if self.capacity else contiguous

    @property
    def is_bound_by_power(self) -> bool:
        return self.rows >= _ROWS_BOUND_BY_POWER

    def floor(self, bytes_per_second: float) -> float:
        """Microseconds that no implementation can do without."""
        shape = W4a8Shape(num_experts=self.num_experts, n=self.n, k=self.k, is_gated=self.is_gated)
        return shape.floor_microseconds(self.rows, bytes_per_second)


def cases() -> Iterator[Case]:
    """Those of one shape of weights follow each other."""
    num_experts, rows_each = _CONTIGUOUS
    for n, k in (_GATE_UP, _DOWN):
        yield from (_masked(rows, n, k) for rows in _ROWS)
        yield from (_masked(rows, n, k, with_smallest=True) for rows in _ROWS_WITH_SMALLEST)
        yield from (_masked(rows, n, k, scales="row") for rows in _ROWS_BY_ROW)
        yield from (_masked(rows, n, k, scales="all") for rows in _ROWS_STATIC)
        for scales in _ENDINGS:
            yield Case(num_experts=num_experts, rows=rows_each, n=n, k=k, capacity=0, scales=scales)
        if (n, k) == _GATE_UP:
            yield from (_masked(rows, n, k, is_gated=True) for rows in _ROWS_GATED)
            yield from (_masked(rows, n, k, scales="all", is_gated=True) for rows in _ROWS_GATED)


def _masked(
    rows: int,
    n: int,
    k: int,
    *,
    with_smallest: bool = False,
    scales: Scales = "group",
    is_gated: bool = False,
) -> Case:
    return Case(
        num_experts=_NUM_EXPERTS,
        rows=rows,
        n=n,
        k=k,
        capacity=max(rows, _MIN_CAPACITY),
        with_smallest=with_smallest,
        scales=scales,
        is_gated=is_gated,
    )


class Weights:
    """Of one shape, for all cases that have it: they take longer to make than to multiply by."""

    def __init__(self, num_experts: int, n: int, k: int, make: Tensors) -> None:
        self._sizes = (num_experts, n, k)
        self._make = make
        self._packed: dict[bool, PackedWeights] = {}
        self._fp8: tuple[Tensor, Tensor] | None = None

    def packed(self, case: Case) -> PackedWeights:
        if case.with_smallest not in self._packed:
            self._packed[case.with_smallest] = self._pack(with_smallest=case.with_smallest)
        return PackedWeights(self._packed[case.with_smallest].blocks[: case.num_experts])

    def fp8(self, case: Case) -> tuple[Tensor, Tensor]:
        num_experts, n, k = self._sizes
        if self._fp8 is None:
            scales = self._make.random(num_experts, n // GROUP, k // GROUP)
            self._fp8 = self._make.fp8(num_experts, n, k), scales
        values, scales = self._fp8
        return values[: case.num_experts], scales[: case.num_experts]

    def _pack(self, *, with_smallest: bool) -> PackedWeights:
        """Of quantised normal matrices: the power that products take depends on the bits that
        change, and their speed on that."""
        num_experts, n, k = self._sizes
        weights, scales = [], []
        for _ in range(num_experts):
            groups = torch.randn(n, k // GROUP, GROUP, device=self._make.device)
            values = rounded_by_largest(groups).flatten(1)
            if with_smallest:
                values[:, 0] = SMALLEST
            weights.append(pack_nibbles(values))
            scales.append(self._make.random(n, k // GROUP) + 0.5)
        return pack_weights(weights, scales)


def ours(case: Case, weights: PackedWeights, make: Tensors) -> Call:
    activations = make.fp8(*case.shape, case.k)
    scales = {
        "group": lambda: make.random(*case.shape, case.k // GROUP) + 0.5,
        "row": lambda: make.random(*case.shape, 1) + 0.5,
        "all": lambda: make.full((), 1.0, torch.float32),
    }[case.scales]()
    counts = make.full((case.num_experts,), case.rows, torch.int32)
    operands = (activations, scales, weights, counts)
    if case.is_gated:
        # One that spreads what comes out over FP8.
        out_scale = make.full((), 1e6, torch.float32) if case.scales == "all" else None
        return partial(
            w4a8_grouped_gemm_gated, *operands, out_scale=out_scale, expected_rows=case.rows
        )
    out = torch.empty(*case.shape, case.n, dtype=torch.bfloat16, device=make.device)
    if not case.capacity:
        return partial(w4a8_grouped_gemm_contiguous, *operands, out=out)
    return partial(w4a8_grouped_gemm_masked, *operands, out=out, expected_rows=case.rows)


def _theirs(
    case: Case, deep_gemm: ModuleType, weights: tuple[Tensor, Tensor], make: Tensors
) -> Call:
    """With activation scales in the layout that DeepGEMM turns others into first."""
    activations = make.fp8(*case.shape, case.k)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(
        make.random(*case.shape, case.k // GROUP) + 0.5
    )
    out = torch.empty(*case.shape, case.n, dtype=torch.bfloat16, device=make.device)
    experts = torch.arange(case.num_experts, dtype=torch.int32, device=make.device)
    if not case.capacity:
        layout = experts.repeat_interleave(case.rows)
        return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (activations, scales), weights, out, layout
        )
    counts = torch.full_like(experts, case.rows)
    return lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(
        (activations, scales), weights, out, counts, case.rows
    )


def _deep_gemm() -> ModuleType | None:
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return None


def measure(
    run: Run, make: Tensors, only: Sequence[str] = (), before: CudaKernel | None = None
) -> Iterator[Record]:
    """Of cases called so, else of all; in turns with the kernel as it was, where it is given."""
    deep_gemm = _deep_gemm()
    rate = copy_bytes_per_second()
    yield run.record("copy by a kernel", "rate", "GB/s", rate / 1e9)
    chosen = [case for case in cases() if not only or case.name in only]
    # What heats the device comes last.
    chosen.sort(key=lambda case: case.is_bound_by_power)
    for (n, k), of_shape in groupby(chosen, key=lambda case: (case.n, case.k)):
        weights = Weights(_NUM_EXPERTS, n, k, make)
        for case in of_shape:
            calls = 10 if case.capacity else 2
            call = ours(case, weights.packed(case), make)
            own = captured(call, calls)
            peers: dict[str, Replay] = {}
            if before is not None:
                with launched(before):
                    peers["before"] = captured(call, calls)
            if deep_gemm and not case.is_gated:
                library = _theirs(case, deep_gemm, weights.fp8(case), make)
                layout = "masked" if case.capacity else "contiguous"
                peers[f"DeepGEMM FP8 {layout}"] = captured(library, calls)
            value, *theirs = in_turns(own, *peers.values())
            known = dict(zip(peers, theirs, strict=True)) | {"floor": case.floor(rate)}
            yield from _records(run, case, "time", value, known)
            if not (peers and case.is_bound_by_power):
                continue
            for metric, way in _BY_OWN_POWER.items():
                value, *theirs = way(own, *peers.values())
                yield from _records(run, case, metric, value, dict(zip(peers, theirs, strict=True)))


def _records(
    run: Run, case: Case, metric: str, value: float, peers: Mapping[str, float]
) -> Iterator[Record]:
    for peer, peer_value in peers.items():
        yield run.record(case.name, metric, "us", value, peer=peer, peer_value=peer_value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the W4A8 grouped GEMM.")
    parser.add_argument("--no-record", action="store_true", help="only print")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="cases called so")
    parser.add_argument("--before", metavar="REVISION", help="beside the kernel of then; no record")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - {case.name for case in cases()}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    path = None if options.no_record or options.before else RESULTS_FILE
    with tempfile.TemporaryDirectory() as folder:
        before = None
        if options.before:
            try:
                before = at_revision(options.before, Path(folder))
            except ValueError as error:
                parser.error(str(error))
        found = measure(Run.begin(BENCH), Tensors(), options.only, before)
        for record in kept(found, path):
            tell(record)
    return 0


def tell(record: Record) -> None:
    peer = ""
    if record.peer_value is not None:
        ratio = record.peer_value / record.value
        peer = f" {record.peer}: {record.peer_value:8.1f} us {ratio:5.2f}"
    sys.stdout.write(
        f"{record.case:44} {record.metric:17} {record.value:8.1f} {record.unit}{peer}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
