"""Kernels at the shapes of DeepSeek-V3: `make bench-kernels`, or `python -m bench.kernels`.

Prints, per operation and shape, our time, a library's for the same where one is installed, the
floor from bytes and FLOPs (bytes at the rate that a large copy by a kernel reaches in the same
run) and the ratios; appends records to bench/results/kernels.jsonl, one a peer. A time is the
median over replays of a CUDA graph of several calls, ours and the library's in turns.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.kernel_cases import attention, experts, products, rows
from bench.kernel_cases.case import Case, Tensors, installed
from bench.kernel_cases.gpu_timing import Call, Replay, captured, copy_bytes_per_second, in_turns
from bench.records import RESULTS
from loadgen.records import BenchRun, Record, append

NAMES = {"deep_gemm": "DeepGEMM", "flash_mla": "FlashMLA", "torch": "sorting"}
CALLS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microseconds; `library` None where there is none."""

    case: Case
    ours: float
    library: float | None
    floor: float

    def line(self) -> str:
        row = f"{self.case.bench:16} {self.case.name:38} {self.ours:8.1f} us"
        row += f"  floor {self.floor:8.1f} us {self.floor / self.ours:5.2f}"
        if self.library is not None:
            name = NAMES[self.case.package]
            row += f"  {name} {self.library:8.1f} us {self.library / self.ours:5.2f}"
        return row + "\n"

    def records(self, run: BenchRun) -> Iterator[Record]:
        time = (self.case.name, "time", "us", self.ours)
        if self.library is not None:
            yield run.record(*time, peer=NAMES[self.case.package], peer_value=self.library)
        yield run.record(*time, peer="floor", peer_value=self.floor)


def cases(make: Tensors) -> Iterator[Case]:
    yield from rows.cases(make)
    yield from experts.cases(make)
    yield from products.cases(make)
    yield from attention.cases(make)


def measure(chosen: Iterable[Case], bytes_per_second: float) -> Iterator[Measured]:
    for case in chosen:
        module = installed(case.package) if case.library is not None else None
        library = None
        if module is not None and case.library is not None:
            # A peer that waits for the host cannot be captured: not compared.
            library = _captured(case.library(module), f"{case.bench} {case.name}: peer")
        ours = _captured(case.call, f"{case.bench} {case.name}")
        if ours is not None:
            own, *theirs = in_turns(ours, *([library] if library else []))
            yield Measured(
                case=case,
                ours=own,
                library=theirs[0] if theirs else None,
                floor=case.floor(bytes_per_second),
            )


def _captured(call: Call, name: str) -> Replay | None:
    """None, and said, where it fails: one that does not compile hides no other."""
    try:
        return captured(call, CALLS)
    except Exception as error:  # noqa: BLE001 - whatever a compiler throws
        sys.stdout.write(f"{name}: failed: {error!r:.300}\n")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels.")
    parser.add_argument("--no-record", action="store_true", help="only print")
    parser.add_argument("--only", nargs="*", default=[], help="operations that begin so")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    only = tuple(options.only) or ("",)
    make = Tensors()
    rate = copy_bytes_per_second()
    sys.stdout.write(f"copy: {rate / 1e12:.2f} TB/s\n")
    chosen = (case for case in cases(make) if case.bench.startswith(only))
    path = None if options.no_record else RESULTS / "kernels.jsonl"
    if path is not None:
        append(path, [BenchRun.begin("copy").record("by a kernel", "rate", "GB/s", rate / 1e9)])
    runs: dict[str, BenchRun] = {}
    for measured in measure(chosen, rate):
        sys.stdout.write(measured.line())
        sys.stdout.flush()
        bench = measured.case.bench
        if path is not None:  # at once: a run that is cut short keeps what it has
            append(path, measured.records(runs.setdefault(bench, BenchRun.begin(bench))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
