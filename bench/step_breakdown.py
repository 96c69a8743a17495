"""Where the time of a step goes: microseconds by kernel, and by what kernels are for."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.step_floor import StepFloor
from bench.step_kernels import purpose_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Of one step: `count` launches that take `microseconds` together."""

    name: str
    count: int
    microseconds: float

    @property
    def purpose(self) -> str:
        return purpose_of(self.name)


def profile_step(step: Callable[[], object], device: torch.device) -> list[Kernel]:
    """One call of `step`, the longest kernels first; on a CPU, its operations."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    step()
    with profile(activities=[activity]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    kernels = [
        Kernel(
            name=each.key,
            count=each.count,
            microseconds=each.self_device_time_total if on_gpu else each.self_cpu_time_total,
        )
        for each in profiler.key_averages()
    ]
    # What the host does is listed too, without time on the device.
    return sorted((k for k in kernels if k.microseconds > 0), key=lambda k: -k.microseconds)


def by_purpose(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds, the largest first."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        sums[kernel.purpose] = sums.get(kernel.purpose, 0.0) + kernel.microseconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def write_breakdown(
    path: Path, case: str, kernels: Sequence[Kernel], floor: StepFloor | None = None
) -> None:
    """JSON: by purpose, then every kernel, with the floor next to each; null where there is none.
    Without `floor` there is none at all."""
    if floor is not None:  # by the rate that is written, which gives the same ones again
        floor = replace(floor, bytes_per_second=float(f"{floor.bytes_per_second:.5g}"))
    content = {
        "case": case,
        "bytes_per_second": floor and floor.bytes_per_second,
        "num_kernels": sum(kernel.count for kernel in kernels),
        "microseconds": round(sum(kernel.microseconds for kernel in kernels), 1),
        "floor": floor and _digits(floor.of_step),
        "purposes": [
            {
                "purpose": purpose,
                "microseconds": round(used, 1),
                "floor": floor and _digits(floor.of_purpose(purpose)),
            }
            for purpose, used in by_purpose(kernels).items()
        ],
        "kernels": [_kernel_row(kernel, floor) for kernel in kernels],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _kernel_row(kernel: Kernel, floor: StepFloor | None) -> dict[str, Any]:
    names, least = floor.of_kernel(kernel.name, kernel.count) if floor else ((), None)
    return {
        "name": kernel.name,
        "purpose": kernel.purpose,
        "operations": list(names),
        "count": kernel.count,
        "microseconds": kernel.microseconds,
        "floor": _digits(least),
    }


def _digits(value: float | None) -> float | None:
    """Five significant digits, more than were measured."""
    return None if value is None else float(f"{value:.5g}")
