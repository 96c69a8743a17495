"""Measured numbers as JSON lines, one record a number, appended and never rewritten."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

# Of the repository: results do not change what is measured.
_NOT_MEASURED = (":/", ":!/bench/results", ":!/README.md", ":!/docs/benchmarks.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One number.

    date        ISO 8601, UTC
    commit      of the measured code, "-dirty" when the tree differed from it
    gpu         what it ran on: "1 x NVIDIA H200", "cpu: 2 x Intel Xeon ..."
    bench       the program that measured
    case        what was measured, in words that stay the same from run to run
    peer        what it is compared with, and its number for the same; or None
    """

    date: str
    commit: str
    gpu: str
    bench: str
    case: str
    metric: str
    unit: str
    value: float
    peer: str | None = None
    peer_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """What the records of one run have in common."""

    date: str
    commit: str
    gpu: str
    bench: str

    @classmethod
    def begin(cls, bench: str, *, on_cpu: bool = False) -> "BenchRun":
        """`on_cpu`: GPUs have no part in it."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit(),
            gpu=processors() if on_cpu else hardware(),
            bench=bench,
        )

    def record(
        self,
        case: str,
        metric: str,
        unit: str,
        value: float,
        *,
        peer: str | None = None,
        peer_value: float | None = None,
    ) -> Record:
        """Without `peer_value` the record has no peer."""
        return Record(
            date=self.date,
            commit=self.commit,
            gpu=self.gpu,
            bench=self.bench,
            case=case,
            metric=metric,
            unit=unit,
            value=_rounded(value),
            peer=None if peer_value is None else peer,
            peer_value=None if peer_value is None else _rounded(peer_value),
        )


def append(path: Path, records: Iterable[Record]) -> None:
    """Adds records after those that are there; makes the folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(asdict(record)) + "\n")


def commit() -> str:
    """Short commit id of the code that runs; outside of a checkout what EPSERVE_COMMIT says, or
    "unknown"."""
    short = _output("git", "rev-parse", "--short", "HEAD")
    if not short:
        return os.environ.get("EPSERVE_COMMIT") or "unknown"
    changed = _output("git", "status", "--porcelain", "--", *_NOT_MEASURED)
    return f"{short}-dirty" if changed else short


def hardware() -> str:
    """GPUs that this process may use, or the processor where there are none."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # the tool lists all, as it is
        query.append(f"--id={visible}")
    gpus = _output(*query).splitlines() if visible != "" else []
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    return processors()


def processors() -> str:
    """Cores that this process may use."""
    return f"cpu: {len(os.sched_getaffinity(0))} x {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str:
    """What a command prints; nothing when it fails or does not exist."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20,
            cwd=Path(__file__).parent,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""


def _rounded(value: float) -> float:
    """Four significant digits: more were not measured."""
    return float(f"{value:.4g}")
