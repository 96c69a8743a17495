"""Folders in which compiled kernels are kept from one start to the next."""

import os
from pathlib import Path


def own_kernels() -> Path:
    """Of our kernels in CUDA C++."""
    if folder := os.environ.get("EPSERVE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epserve"


def triton_kernels() -> Path:
    """Of Triton, which has the rule."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def deep_gemm_kernels() -> Path:
    """Of DeepGEMM, which has the rule."""
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")
