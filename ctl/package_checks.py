"""Python, and the packages that workers need or are faster with."""

import json
import sys

from ctl.finding import Finding
from ctl.host import Host

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

# distributions that it may come from, what it is called, what it does
_FAST_PATHS = (
    (
        ("deep_ep", "sgl-deep-ep"),
        "DeepEP",
        "expert-parallel dispatch over NVLink and RDMA; without it NCCL is used",
    ),
    (
        ("deep_gemm", "sgl-deep-gemm"),
        "DeepGEMM",
        "FP8 products on Hopper; without it our own kernels compute them, up to a third slower of "
        "many tokens",
    ),
    (
        ("flash_mla",),
        "FlashMLA",
        "attention on Hopper in decode steps of more than 128 rows, and of few new tokens behind a "
        "cached prefix; without it our own kernels compute it",
    ),
)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    text = ".".join(map(str, version))
    if version in _PYTHONS:
        return [Finding(check="Python", state="ok", detail=f"{text}, {sys.executable}")]
    advice = "Make the virtual environment with Python 3.11 or 3.12."
    return [Finding(check="Python", state="missing", detail=text, advice=advice)]


def check_torch(host: Host, *, cuda: bool) -> list[Finding]:
    """Whether torch is there, of a version that fits, and sees the GPUs."""
    version = host.version("torch")
    if not version:
        advice = "pip install 'torch>=2.11,<2.14'."
        detail = "not installed: workers cannot run"
        return [Finding(check="torch", state="missing", detail=detail, advice=advice)]
    fits, answer = host.run_python(_ASK_TORCH)
    if not fits:
        advice = "Install torch again, in a fresh virtual environment."
        detail = f"{version} cannot be imported: {answer}"
        return [Finding(check="torch", state="missing", detail=detail, advice=advice)]
    facts = json.loads(answer)
    detail = f"{version}, {facts['devices']} CUDA devices" if cuda else version
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not _TORCH[0] <= numbers < _TORCH[1]:
        advice = "Tested are 2.11 to 2.13: pip install 'torch>=2.11,<2.14'."
        return [Finding(check="torch", state="warning", detail=detail, advice=advice)]
    if cuda and not facts["devices"]:
        advice = (
            "This is a build for CPU: install one for CUDA."
            if not facts["cuda"]
            else f"It is built for CUDA {facts['cuda']}: update the driver."
        )
        return [Finding(check="torch", state="missing", detail=detail, advice=advice)]
    if cuda and not facts["nccl"]:
        advice = "EP groups of several ranks need a torch with NCCL."
        return [Finding(check="torch", state="warning", detail=detail, advice=advice)]
    return [Finding(check="torch", state="ok", detail=detail)]


def check_nixl(host: Host) -> list[Finding]:
    """Whether KV can be moved at all: an agent is made, as a rank would."""
    version = host.version("nixl")
    if not version:
        advice = "pip install nixl==1.5.1, behind torch (or it brings another torch)."
        detail = "not installed: workers cannot exchange KV"
        return [Finding(check="NIXL", state="missing", detail=detail, advice=advice)]
    works, answer = host.run_python(_ASK_NIXL)
    if works:
        return [Finding(check="NIXL", state="ok", detail=f"{version} with UCX")]
    advice = "See what `python -c 'import nixl._api'` says; install nixl==1.5.1 again."
    return [Finding(check="NIXL", state="missing", detail=f"{version}: {answer}", advice=advice)]


def check_fast_paths(host: Host, *, cuda: bool) -> list[Finding]:
    """Libraries that make GPUs faster; nothing breaks without them."""
    findings = []
    for distributions, name, purpose in _FAST_PATHS:
        version = next(filter(None, map(host.version, distributions)), "")
        if version:
            findings.append(Finding(check=name, state="ok", detail=version))
        elif cuda:
            advice = f"{name}: {purpose}. Build it for this torch and CUDA."
            findings.append(
                Finding(check=name, state="warning", detail="not installed", advice=advice)
            )
        else:
            detail = "not installed; of no use on cpu"
            findings.append(Finding(check=name, state="note", detail=detail))
    return findings


def check_versions(host: Host) -> list[Finding]:
    """What to write into a bug report."""
    names = ("epserve", "grpcio", "protobuf", "triton", "safetensors", "xgrammar", "kubernetes")
    known = [f"{name} {host.version(name) or 'missing'}" for name in names]
    return [Finding(check="versions", state="ok", detail=", ".join(known))]
