"""Which implementation of each operation runs on a device: the best that is installed.

    path_of("rms_norm", device)   "triton"
    noted()                       {"rms_norm": "triton", ...}, what this process has taken

Where sizes, or a library that could not be compiled, decide further, the operation's module does
that, in a function `path_for`. EPSERVE_KERNELS=reference takes the torch references everywhere.
"""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

from core.cuda_home import cuda_home

_log = logging.getLogger(__name__)

# Best first; the reference comes after all of them. NOTE: a kernel in CUDA is named here where it
# is asked for before all others, not where a path after it hands some sizes to it.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "absorb": ("cuda", "triton"),
    "combine": ("triton",),
    "fp8_gemm": ("deep_gemm", "triton"),
    "fp8_grouped_gemm": ("deep_gemm", "triton"),
    "fused_moe": ("triton",),
    "gate": ("triton",),
    "grouped_linear": ("triton",),
    "mla_decode": ("flash_mla", "triton"),
    "mla_prefill": ("cuda", "triton"),
    "pack_tokens": ("triton",),
    "permute": ("triton",),
    "quantise": ("triton",),
    "rescale": ("triton",),
    "rms_norm": ("triton",),
    "rope_write": ("triton",),
    "router_gemm": ("cuda", "triton"),
    "sample": ("triton",),
    "silu_mul": ("triton",),
    "w4a8_grouped_gemm": ("cuda",),
    "w4a8_packing": ("triton",),
}
# The package that a path comes from; "cuda" is ours, compiled at first use.
PACKAGES = {"deep_gemm": "deep_gemm", "flash_mla": "flash_mla", "triton": "triton"}
_noted: dict[str, set[str]] = {}


def are_references_asked_for() -> bool:
    """On any device. Some of them look at what is on it, so that steps of them cannot be recorded
    as graphs."""
    return os.environ.get("EPSERVE_KERNELS") == "reference"


def best_path(operation: str, device: torch.device) -> str:
    """The best path of `operation` on `device`. KeyError for an unknown operation."""
    return _best_path(operation, device.type, device.index or 0)


def path_of(operation: str, device: torch.device) -> str:
    """`best_path`, noted: for operations that take it whatever the sizes."""
    return note(operation, best_path(operation, device))


def note(operation: str, path: str) -> str:
    """Gives `path`, by which this process computes an `operation` of some size."""
    _noted.setdefault(operation, set()).add(path)
    return path


def noted() -> dict[str, str]:
    """By operation, the paths taken so far; the names of several are joined by +."""
    return {operation: "+".join(sorted(paths)) for operation, paths in sorted(_noted.items())}


@cache
def _best_path(operation: str, device_type: str, index: int) -> str:
    candidates = OPERATIONS[operation]
    if device_type != "cuda" or are_references_asked_for():
        return "reference"
    is_hopper = torch.cuda.get_device_capability(index)[0] == 9
    for candidate in candidates:
        needs_hopper = candidate != "triton"
        if (is_hopper or not needs_hopper) and _is_installed(candidate):
            return candidate
    return "reference"


@cache
def _is_installed(path: str) -> bool:
    package = PACKAGES.get(path)
    if package is not None and find_spec(package) is None:
        return False
    if path == "deep_gemm" and cuda_home() is None:
        _log.warning(
            "DeepGEMM is left out: it compiles with nvcc, which pip install 'epserve[gpu]' brings"
        )
        return False
    return True
