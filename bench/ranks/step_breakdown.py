"""Where the time of a step goes: microseconds by kernel, and by what kernels are for."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

OTHER = "everything else"
# The first pattern that a kernel's name has counts.
PURPOSES: dict[str, str] = {
    r"w4a8|grouped|fused_moe|GemmType\)[1-9]|_aligned_gemm|masked_gemm": "expert products",
    r"quantise|silu|rescale": "quantise and activate",
    r"mla|flash|splitkv|attend|_merge_states|^_join$": "attention",
    r"rms_norm|rope": "norms and rotation",
    r"router|_gate|count_experts|_rank$": "gate",
    r"permute|_place$|_align$|_copy$|combine": "permute and combine",
    r"gemm|cutlass|cublas|splitk|_splits|bmm|dot_kernel|absorb|nvjet": "dense products",
}


def purpose_of(kernel: str) -> str:
    found = (
        purpose
        for pattern, purpose in PURPOSES.items()
        if re.search(pattern, kernel, re.IGNORECASE)
    )
    return next(found, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Of one step: `count` launches that take `microseconds` together."""

    name: str
    purpose: str
    count: int
    microseconds: float


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


def write_breakdown(path: Path, case: str, kernels: Sequence[Kernel]) -> None:
    """JSON: by purpose, then every kernel."""
    content = {
        "case": case,
        "num_kernels": sum(kernel.count for kernel in kernels),
        "microseconds": round(sum(kernel.microseconds for kernel in kernels), 1),
        "purposes": [
            {"purpose": purpose, "microseconds": round(used, 1)}
            for purpose, used in by_purpose(kernels).items()
        ],
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
