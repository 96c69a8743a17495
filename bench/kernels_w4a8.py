"""The W4A8 grouped GEMM against DeepGEMM's FP8 one: `python -m bench.kernels_w4a8`.

Masked: 32 experts with the same number of rows each; contiguous: 8 experts x 4,096 rows; for the
two projections of a DeepSeek-V3 expert. Activations have a scale for each 128 columns, as those of
DeepGEMM always do, or one a row where a case says so. Weights are those of quantised normal
matrices; cases that say so have a -8 among them, which takes another code. A time is the median
over replays of a CUDA graph of several calls, divided by their number; weights exceed the L2 cache
several times over. Without DeepGEMM only our times are taken. Appends records to
bench/results/w4a8_grouped_gemm.jsonl.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from bench.gpu_timing import Call, copy_bytes_per_second, microseconds
from bench.kernels_floor import W4a8Shape
from bench.records import RESULTS, Record, Run, append
from kernels.w4a8_grouped_gemm import w4a8_grouped_gemm_contiguous, w4a8_grouped_gemm_masked
from kernels.w4a8_grouped_gemm_packing import GROUP, PackedWeights, pack_weights
from model.dummy_checkpoint import rounded_by_largest
from model.quantize_int4 import SMALLEST, pack_nibbles

BENCH = "w4a8_grouped_gemm"
RESULTS_FILE = RESULTS / f"{BENCH}.jsonl"
_BY_ROW = " row scales"  # ends the names of such cases
_SHAPES = ((4096, 7168), (7168, 2048))
_NUM_EXPERTS = 32
_ROWS = (1, 4, 16, 32, 64, 128, 256)
_MIN_CAPACITY = 64
_ROWS_WITH_SMALLEST = (64, 128)
_ROWS_BY_ROW = (1, 32, 64, 128, 256)
_CONTIGUOUS = (8, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape; `capacity` 0 for the contiguous layout."""

    name: str
    num_experts: int
    rows: int
    n: int
    k: int
    capacity: int
    with_smallest: bool = False
    by_row: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_experts * (self.capacity or self.rows)

    def floor(self, bytes_per_second: float) -> float:
        """Microseconds that no implementation can do without."""
        shape = W4a8Shape(num_experts=self.num_experts, n=self.n, k=self.k)
        return shape.floor_microseconds(self.rows, bytes_per_second)


def cases() -> Iterator[Case]:
    for n, k in _SHAPES:
        yield from (_masked(rows, n, k) for rows in _ROWS)
        yield from (_masked(rows, n, k, with_smallest=True) for rows in _ROWS_WITH_SMALLEST)
        yield from (_masked(rows, n, k, by_row=True) for rows in _ROWS_BY_ROW)
        num_experts, rows = _CONTIGUOUS
        for by_row in (False, True):
            yield Case(
                name=f"contiguous e{num_experts} m{rows} n{n} k{k}" + _BY_ROW * by_row,
                num_experts=num_experts,
                rows=rows,
                n=n,
                k=k,
                capacity=0,
                by_row=by_row,
            )


def _masked(
    rows: int, n: int, k: int, *, with_smallest: bool = False, by_row: bool = False
) -> Case:
    suffix = f" with {SMALLEST}" * with_smallest + _BY_ROW * by_row
    return Case(
        name=f"masked e{_NUM_EXPERTS} m{rows} n{n} k{k}{suffix}",
        num_experts=_NUM_EXPERTS,
        rows=rows,
        n=n,
        k=k,
        capacity=max(rows, _MIN_CAPACITY),
        with_smallest=with_smallest,
        by_row=by_row,
    )


def _fp8(*shape: int) -> torch.Tensor:
    """Random values of a wide range, made in parts: float32 ones would need four times the room."""
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(-1, shape[-1]).split(8192):
        part.copy_((60 * torch.randn(part.shape, device="cuda")).clamp(-400, 400))
    return out


def _packed(case: Case) -> PackedWeights:
    """Of quantised normal matrices: the power that products take depends on the bits that change,
    and their speed on that."""
    weights, scales = [], []
    for _ in range(case.num_experts):
        groups = torch.randn(case.n, case.k // GROUP, GROUP, device="cuda")
        values = rounded_by_largest(groups).flatten(1)
        if case.with_smallest:
            values[:, 0] = SMALLEST
        weights.append(pack_nibbles(values))
        scales.append(torch.rand(case.n, case.k // GROUP, device="cuda") + 0.5)
    return pack_weights(weights, scales)


def _ours(case: Case, weights: PackedWeights) -> Call:
    activations = _fp8(case.num_rows, case.k)
    columns = 1 if case.by_row else case.k // GROUP
    scales = torch.rand(case.num_rows, columns, device="cuda") + 0.5
    counts = torch.full((case.num_experts,), case.rows, dtype=torch.int32, device="cuda")
    out = torch.empty(case.num_rows, case.n, dtype=torch.bfloat16, device="cuda")
    if not case.capacity:
        return lambda: w4a8_grouped_gemm_contiguous(activations, scales, weights, counts, out=out)
    shape = (case.num_experts, case.capacity, -1)
    return lambda: w4a8_grouped_gemm_masked(
        activations.view(shape),
        scales.view(shape),
        weights,
        counts,
        out=out.view(shape),
        expected_rows=case.rows,
    )


def _theirs(case: Case, deep_gemm: ModuleType, weights: tuple[torch.Tensor, torch.Tensor]) -> Call:
    """With activation scales in the layout that DeepGEMM turns others into first."""
    weights = (weights[0][: case.num_experts], weights[1][: case.num_experts])
    shape = (case.num_experts, case.capacity) if case.capacity else (case.num_rows,)
    activations = _fp8(*shape, case.k)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(
        torch.rand(*shape, case.k // GROUP, device="cuda") + 0.5
    )
    out = torch.empty(*shape, case.n, dtype=torch.bfloat16, device="cuda")
    experts = torch.arange(case.num_experts, dtype=torch.int32, device="cuda")
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


def measure(run: Run) -> Iterator[Record]:
    deep_gemm = _deep_gemm()
    rate = copy_bytes_per_second()
    yield run.record("copy by a kernel", "rate", "GB/s", rate / 1e9)
    of_shape: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for case in cases():
        calls = 10 if case.capacity else 2
        value = microseconds(_ours(case, _packed(case)), calls)
        peer_value = None
        if deep_gemm:
            shape = (case.n, case.k)
            if shape not in of_shape:
                of_shape = {
                    shape: (
                        _fp8(_NUM_EXPERTS, *shape),
                        torch.rand(_NUM_EXPERTS, case.n // 128, case.k // 128, device="cuda"),
                    )
                }
            peer_value = microseconds(_theirs(case, deep_gemm, of_shape[shape]), calls)
        layout = "masked" if case.capacity else "contiguous"
        if deep_gemm:
            peer = f"DeepGEMM FP8 {layout}"
            yield run.record(case.name, "time", "us", value, peer=peer, peer_value=peer_value)
        floor = case.floor(rate)
        yield run.record(case.name, "time", "us", value, peer="floor", peer_value=floor)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the W4A8 grouped GEMM.")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    records = []
    for record in measure(Run.begin(BENCH)):
        records.append(record)
        peer = ""
        if record.peer_value is not None:
            ratio = record.peer_value / record.value
            peer = f" {record.peer}: {record.peer_value:8.1f} us {ratio:5.2f}"
        sys.stdout.write(f"{record.case:42} {record.value:8.1f} {record.unit}{peer}\n")
        sys.stdout.flush()
    if not options.no_record:
        append(RESULTS_FILE, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
