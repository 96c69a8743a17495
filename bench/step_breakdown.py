"""Where the time of a step goes: microseconds by kernel, and by what kernels are for."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.step_floor import ATTENTION_KERNELS, DENSE_PRODUCTS, EXPERT_PRODUCTS

# The first that matches a kernel's name is what it is for.
PURPOSES: tuple[tuple[str, str], ...] = (
    (EXPERT_PRODUCTS, r"grouped|fused_moe|GemmType\)[1-9]|_aligned_gemm|masked_gemm"),
    ("quantise and activate", r"quantise|silu|rescale"),
    (ATTENTION_KERNELS, r"mla|flash|splitkv|attend|_merge_states|^_join$"),
    ("norms and rotation", r"rms_norm|rope"),
    ("gate", r"_gate|router|count_experts|_rank$"),
    ("permute and combine", r"permute|_place$|_align$|_copy$|combine"),
    (DENSE_PRODUCTS, r"gemm|nvjet|cutlass|cublas|splitk|_splits|bmm|dot_kernel|absorb"),
)
OTHER = "everything else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Of one step: `count` launches that take `microseconds` together."""

    name: str
    purpose: str
    count: int
    microseconds: float


def purpose_of(name: str) -> str:
    for purpose, pattern in PURPOSES:
        if re.search(pattern, name, re.IGNORECASE):
            return purpose
    return OTHER


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
            purpose=purpose_of(each.key),
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
    path: Path, case: str, kernels: Sequence[Kernel], floor: Mapping[str, float]
) -> None:
    """JSON: by purpose with the floor next to it, then every kernel."""
    purposes = [
        {"purpose": name, "microseconds": round(used, 1), "floor": round(floor.get(name, 0.0), 1)}
        for name, used in by_purpose(kernels).items()
    ]
    content = {
        "case": case,
        "num_kernels": sum(kernel.count for kernel in kernels),
        "microseconds": round(sum(kernel.microseconds for kernel in kernels), 1),
        "purposes": purposes,
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
