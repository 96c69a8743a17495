"""Python, and the packages that workers need or are faster with."""

import json
import sys
from collections.abc import Iterator

from ctl.base.host import Host
from ctl.doctor.finding import Finding, missing, note, ok, warning

_PYTHONS = ((3, 11), (3, 12))
# As in pyproject.toml.
_TORCH = ((2, 11), (2, 14))

_ASK_TORCH = """
import json, torch
print(json.dumps({
    "cuda": torch.version.cuda or "",
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "nccl": torch.distributed.is_nccl_available(),
}))
"""
_ASK_NIXL = """
from transfer.nixl_library import create_agent
create_agent("doctor")
print("UCX")
"""

# What it is called, the distributions that it may come from, what it does.
_FAST_PATHS = (
    (
        "DeepEP",
        ("deep_ep", "sgl-deep-ep"),
        "expert-parallel dispatch over NVLink and RDMA; without it NCCL is used",
    ),
    (
        "DeepGEMM",
        ("deep_gemm", "sgl-deep-gemm"),
        "FP8 products on Hopper; without it our own kernels compute them, up to a third slower of "
        "many tokens",
    ),
    (
        "FlashMLA",
        ("flash_mla",),
        "attention on Hopper in decode steps of more than 128 rows, and of few new tokens after a "
        "cached prefix; without it our own kernels compute it",
    ),
)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    text = ".".join(map(str, version))
    if version in _PYTHONS:
        return ok("Python", f"{text}, {sys.executable}")
    return missing("Python", text, "Make the virtual environment with Python 3.11 or 3.12.")


def check_torch(host: Host, *, cuda: bool) -> Finding:
    """Whether torch is there, of a version that fits, and sees the GPUs."""
    version = host.version("torch")
    if not version:
        advice = "pip install 'torch>=2.11,<2.14'."
        return missing("torch", "not installed: workers cannot run", advice)
    fits, answer = host.run_python(_ASK_TORCH)
    if not fits:
        advice = "Install torch again, in a fresh virtual environment."
        return missing("torch", f"{version} cannot be imported: {answer}", advice)
    facts = json.loads(answer)
    detail = f"{version}, {facts['devices']} CUDA devices" if cuda else version
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not _TORCH[0] <= numbers < _TORCH[1]:
        advice = "Tested are 2.11 to 2.13: pip install 'torch>=2.11,<2.14'."
        return warning("torch", detail, advice)
    if cuda and not facts["devices"]:
        advice = "This is a build for CPU: install one for CUDA."
        if facts["cuda"]:
            advice = f"It is built for CUDA {facts['cuda']}: update the driver."
        return missing("torch", detail, advice)
    if cuda and not facts["nccl"]:
        return warning("torch", detail, "EP groups of several ranks need a torch with NCCL.")
    return ok("torch", detail)


def check_nixl(host: Host) -> Finding:
    """Whether KV can be moved at all: an agent is made, as a rank would."""
    version = host.version("nixl")
    if not version:
        advice = "pip install nixl==1.5.1, after torch (or it brings another torch)."
        return missing("NIXL", "not installed: workers cannot exchange KV", advice)
    works, answer = host.run_python(_ASK_NIXL)
    if works:
        return ok("NIXL", f"{version} with UCX")
    advice = "See what `python -c 'import nixl._api'` says; install nixl==1.5.1 again."
    return missing("NIXL", f"{version}: {answer}", advice)


def check_fast_paths(host: Host, *, cuda: bool) -> Iterator[Finding]:
    """Libraries that make GPUs faster; nothing breaks without them."""
    for name, distributions, purpose in _FAST_PATHS:
        version = next(filter(None, map(host.version, distributions)), "")
        if version:
            yield ok(name, version)
        elif cuda:
            advice = f"{name}: {purpose}. Build it for this torch and CUDA."
            yield warning(name, "not installed", advice)
        else:
            yield note(name, "not installed; of no use on cpu")


def check_versions(host: Host) -> Finding:
    """What to write into a bug report."""
    names = ("epserve", "grpcio", "protobuf", "triton", "safetensors", "xgrammar", "kubernetes")
    return ok("versions", ", ".join(f"{name} {host.version(name) or 'missing'}" for name in names))
