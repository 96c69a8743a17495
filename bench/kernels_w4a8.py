"""The W4A8 grouped GEMM against DeepGEMM's FP8 one: `python -m bench.kernels_w4a8`.

Masked: 32 experts with the same number of rows each; contiguous: 8 experts x 4,096 rows; for the
two projections of a DeepSeek-V3 expert. Gated: gate and up with the activation after them, masked,
which DeepGEMM has nothing like. Activations have a scale for each 128 columns, as those of DeepGEMM
always do, or, where a case says so, one a row, or one for all that the checkpoint gives ("static",
gated with another for what comes out). Weights are those of quantised normal matrices; cases that
say so have a -8 among them, which takes another code. A time is the median over replays of a CUDA
graph of several calls, ours and DeepGEMM's in turns, divided by their number; weights exceed the L2
cache several times over. Those that power binds, of 256 rows and more, are compared where each has
its own power, too: after a rest, and each by itself for a second. Without DeepGEMM only our times
are taken. Appends records to bench/results/w4a8_grouped_gemm.jsonl.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Literal

import torch

from bench.kernel_cases.case import Tensor, Tensors, installed
from bench.kernel_cases.gpu_timing import (
    Call,
    Replay,
    captured,
    copy_bytes_per_second,
    in_turns,
    rested,
    sustained,
)
from bench.kernel_cases.w4a8_floor import W4a8Shape
from bench.records import RESULTS, report
from kernels.moe.w4a8_grouped_gemm import (
    w4a8_grouped_gemm_contiguous,
    w4a8_grouped_gemm_gated,
    w4a8_grouped_gemm_masked,
)
from kernels.moe.w4a8_grouped_gemm_packing import GROUP, PackedWeights, pack_weights
from loadgen.records import BenchRun, Record
from model.weights.dummy_checkpoint import rounded_by_largest
from model.weights.int4 import SMALLEST, pack_nibbles

BENCH = "w4a8_grouped_gemm"
RESULTS_FILE = RESULTS / f"{BENCH}.jsonl"
Scales = Literal["group", "row", "all"]
Layout = Literal["masked", "contiguous", "gated"]
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
    """One shape; `rows` of each expert."""

    rows: int
    n: int
    k: int
    num_experts: int = _NUM_EXPERTS
    layout: Layout = "masked"
    with_smallest: bool = False
    scales: Scales = "group"

    @property
    def name(self) -> str:
        ending = f" with {SMALLEST}" * self.with_smallest + _ENDINGS[self.scales]
        return f"{self.layout} e{self.num_experts} m{self.rows} n{self.n} k{self.k}{ending}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of rows as the layout has them."""
        if self.layout == "contiguous":
            return (self.num_experts * self.rows,)
        return self.num_experts, max(self.rows, _MIN_CAPACITY)

    @property
    def is_bound_by_power(self) -> bool:
        return self.rows >= _ROWS_BOUND_BY_POWER

    def floor(self, bytes_per_second: float) -> float:
        """Microseconds that no implementation can do without."""
        is_gated = self.layout == "gated"
        shape = W4a8Shape(num_experts=self.num_experts, n=self.n, k=self.k, is_gated=is_gated)
        return shape.floor_microseconds(self.rows, bytes_per_second)


def cases() -> Iterator[Case]:
    """Those of one shape of weights follow each other."""
    for n, k in (_GATE_UP, _DOWN):
        of = partial(Case, n=n, k=k)
        yield from (of(rows=rows) for rows in _ROWS)
        yield from (of(rows=rows, with_smallest=True) for rows in _ROWS_WITH_SMALLEST)
        yield from (of(rows=rows, scales="row") for rows in _ROWS_BY_ROW)
        yield from (of(rows=rows, scales="all") for rows in _ROWS_STATIC)
        num_experts, rows_each = _CONTIGUOUS
        for scales in _ENDINGS:
            yield of(rows=rows_each, num_experts=num_experts, layout="contiguous", scales=scales)
        if (n, k) == _GATE_UP:
            yield from (of(rows=rows, layout="gated") for rows in _ROWS_GATED)
            yield from (of(rows=rows, layout="gated", scales="all") for rows in _ROWS_GATED)


# Weights take longer to make than to multiply by: those of one shape are kept for all its cases.
@lru_cache(maxsize=2)
def packed_weights(make: Tensors, n: int, k: int, with_smallest: bool) -> PackedWeights:
    """Of quantised normal matrices: the power that products take depends on the bits that change,
    and their speed on that."""
    weights, scales = [], []
    for _ in range(_NUM_EXPERTS):
        groups = torch.randn(n, k // GROUP, GROUP, device=make.device)
        values = rounded_by_largest(groups).flatten(1)
        if with_smallest:
            values[:, 0] = SMALLEST
        weights.append(pack_nibbles(values))
        scales.append(make.random(n, k // GROUP) + 0.5)
    return pack_weights(weights, scales)


@lru_cache(maxsize=1)
def fp8_weights(make: Tensors, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Values and scales, for DeepGEMM."""
    scales = make.random(_NUM_EXPERTS, n // GROUP, k // GROUP)
    return make.fp8(_NUM_EXPERTS, n, k), scales


def ours(case: Case, make: Tensors) -> Call:
    packed = packed_weights(make, case.n, case.k, case.with_smallest)
    weights = PackedWeights(packed.blocks[: case.num_experts])
    activations = make.fp8(*case.shape, case.k)
    scales = {
        "group": lambda: make.random(*case.shape, case.k // GROUP) + 0.5,
        "row": lambda: make.random(*case.shape, 1) + 0.5,
        "all": lambda: make.full((), 1.0, torch.float32),
    }[case.scales]()
    counts = make.full((case.num_experts,), case.rows, torch.int32)
    operands = (activations, scales, weights, counts)
    if case.layout == "gated":
        # One that spreads what comes out over FP8.
        out_scale = make.full((), 1e6, torch.float32) if case.scales == "all" else None
        return partial(
            w4a8_grouped_gemm_gated, *operands, out_scale=out_scale, expected_rows=case.rows
        )
    out = torch.empty(*case.shape, case.n, dtype=torch.bfloat16, device=make.device)
    if case.layout == "contiguous":
        return partial(w4a8_grouped_gemm_contiguous, *operands, out=out)
    return partial(w4a8_grouped_gemm_masked, *operands, out=out, expected_rows=case.rows)


def _theirs(case: Case, deep_gemm: ModuleType, make: Tensors) -> Call:
    """With activation scales in the layout that DeepGEMM turns others into first."""
    values, of_weights = fp8_weights(make, case.n, case.k)
    weights = (values[: case.num_experts], of_weights[: case.num_experts])
    activations = make.fp8(*case.shape, case.k)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(
        make.random(*case.shape, case.k // GROUP) + 0.5
    )
    out = torch.empty(*case.shape, case.n, dtype=torch.bfloat16, device=make.device)
    experts = torch.arange(case.num_experts, dtype=torch.int32, device=make.device)
    if case.layout == "contiguous":
        layout = experts.repeat_interleave(case.rows)
        return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (activations, scales), weights, out, layout
        )
    counts = torch.full_like(experts, case.rows)
    return lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(
        (activations, scales), weights, out, counts, case.rows
    )


def measure(run: BenchRun, make: Tensors, only: Sequence[str] = ()) -> Iterator[Record]:
    """Of cases called so, else of all."""
    deep_gemm = installed("deep_gemm")
    rate = copy_bytes_per_second()
    yield run.record("copy by a kernel", "rate", "GB/s", rate / 1e9)
    chosen = [case for case in cases() if not only or case.name in only]
    # What heats the device comes last.
    chosen.sort(key=lambda case: case.is_bound_by_power)
    for case in chosen:
        calls = 2 if case.layout == "contiguous" else 10
        own = captured(ours(case, make), calls)
        peers: dict[str, Replay] = {}
        if deep_gemm and case.layout != "gated":
            peers[f"DeepGEMM FP8 {case.layout}"] = captured(_theirs(case, deep_gemm, make), calls)
        value, *theirs = in_turns(own, *peers.values())
        known = dict(zip(peers, theirs, strict=True)) | {"floor": case.floor(rate)}
        yield from _records(run, case, "time", value, known)
        if not (peers and case.is_bound_by_power):
            continue
        for metric, way in _BY_OWN_POWER.items():
            value, *theirs = way(own, *peers.values())
            yield from _records(run, case, metric, value, dict(zip(peers, theirs, strict=True)))


def _records(
    run: BenchRun, case: Case, metric: str, value: float, peers: Mapping[str, float]
) -> Iterator[Record]:
    for peer, peer_value in peers.items():
        yield run.record(case.name, metric, "us", value, peer=peer, peer_value=peer_value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the W4A8 grouped GEMM.")
    parser.add_argument("--no-record", action="store_true", help="only print")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="cases called so")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - {case.name for case in cases()}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    path = None if options.no_record else RESULTS_FILE
    report(measure(BenchRun.begin(BENCH), Tensors(), options.only), path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
