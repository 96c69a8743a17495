"""Python, and the packages that workers need or are faster with.

Versions to compare with are those that the installed epserve asks for.
"""

import json
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ctl.base.host import Host
from ctl.doctor.finding import Finding, missing, note, ok, warning
from epserve_start.clashes import NAMES, ROOT, Clash

_PYTHONS = ((3, 11), (3, 12))
_GPU = "pip install 'epserve[gpu]'"

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
# They look for nvcc when they are imported, and want torch's libraries loaded.
_ASK_MODULE = """
import importlib, sys, torch
from core.cuda_home import set_cuda_home
set_cuda_home()
importlib.import_module({module!r})
"""

# What it is called, its module, the distributions that it may come from, what it does.
_FAST_PATHS = (
    (
        "DeepEP",
        "deep_ep",
        ("sgl-deep-ep", "deep_ep"),
        "expert-parallel dispatch over NVLink and RDMA; without it NCCL is used",
    ),
    (
        "DeepGEMM",
        "deep_gemm",
        ("sgl-deep-gemm", "deep_gemm"),
        "FP8 products on Hopper; without it our own kernels compute them, up to a third slower of "
        "many tokens",
    ),
    (
        "FlashMLA",
        "flash_mla",
        ("sgl-flash-mla", "flash_mla"),
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
    wanted = next((each for each in _wanted(host) if each.name == "torch"), Requirement("torch"))
    if not version:
        return missing("torch", "not installed: workers cannot run", f"pip install '{wanted}'.")
    fits, answer = host.run_python(_ASK_TORCH)
    if not fits:
        advice = "Install torch again, in a fresh virtual environment."
        return missing("torch", f"{version} cannot be imported: {answer}", advice)
    facts = json.loads(answer)
    detail = f"{version}, {facts['devices']} CUDA devices" if cuda else version
    if not wanted.specifier.contains(version, prereleases=True):
        return warning("torch", detail, f"Not tested: pip install '{wanted}'.")
    if cuda and not facts["devices"]:
        advice = f"This is a build for CPU: {_GPU}."
        if facts["cuda"]:
            advice = f"It is built for CUDA {facts['cuda']}: update the driver."
        return missing("torch", detail, advice)
    if cuda and not facts["nccl"]:
        return warning("torch", detail, "EP groups of several ranks need a torch with NCCL.")
    return ok("torch", detail)


def check_gpu_set(host: Host, *, cuda: bool) -> Finding:
    """Whether what is installed is the set that was run together."""
    wanted = [*_wanted(host, "gpu")]
    if not wanted:
        return note("GPU set", "unknown: epserve is not installed, but run from its folder")
    found = {str(each): host.version(canonicalize_name(each.name)) for each in wanted}
    others = [
        f"{each.name} {found[str(each)] or 'missing'} (not {str(each.specifier).lstrip('=')})"
        for each in wanted
        if not (found[str(each)] and each.specifier.contains(found[str(each)], prereleases=True))
    ]
    if not others:
        return ok("GPU set", f"all {len(wanted)} packages of epserve[gpu] fit each other")
    detail = ", ".join(others)
    if not cuda:
        return note("GPU set", f"{len(others)} of {len(wanted)} packages of epserve[gpu] differ")
    return warning("GPU set", detail, f"Not run together: {_GPU}, in an environment of its own.")


def check_nixl(host: Host) -> Finding:
    """Whether KV can be moved at all: an agent is made, as a rank would."""
    version = host.version("nixl")
    wanted = next((each for each in _wanted(host) if each.name == "nixl"), Requirement("nixl"))
    if not version:
        advice = f"pip install {wanted}, after torch (or it brings another torch)."
        return missing("NIXL", "not installed: workers cannot exchange KV", advice)
    works, answer = host.run_python(_ASK_NIXL)
    if works:
        return ok("NIXL", f"{version} with UCX")
    advice = f"See what `python -c 'import nixl._api'` says; install {wanted} again."
    return missing("NIXL", f"{version}: {answer}", advice)


def check_fast_paths(host: Host, *, cuda: bool) -> Iterator[Finding]:
    """Libraries that make GPUs faster; nothing breaks without them, but with one that is installed
    and does not fit the torch beside it."""
    for name, module, distributions, purpose in _FAST_PATHS:
        version = next(filter(None, map(host.version, distributions)), "")
        if not version:
            advice = f"{name}: {purpose}. {_GPU}."
            yield (
                warning(name, "not installed", advice)
                if cuda
                else note(name, "not installed; of no use on cpu")
            )
            continue
        works, answer = (
            (True, "") if not cuda else host.run_python(_ASK_MODULE.format(module=module))
        )
        if works:
            yield ok(name, version)
        else:
            advice = f"It is not built for this torch and driver: {_GPU}, or uninstall it."
            yield missing(name, f"{version} cannot be imported: {answer}", advice)


def check_own_packages(clashes: Iterable[Clash]) -> Iterator[Finding]:
    """Whether another distribution has put files among ours."""
    found = [*clashes]
    for clash in found:
        advice = "The other does not work here, and takes ours along when it is removed."
        yield warning("packages", clash.sentence, advice)
    if not found:
        yield ok("packages", f"{len(NAMES)} of ours in {ROOT}, and nobody else's")


def check_versions(host: Host) -> Finding:
    """What to write into a bug report."""
    names = ("epserve", "grpcio", "protobuf", "triton", "safetensors", "llguidance", "kubernetes")
    return ok("versions", ", ".join(f"{name} {host.version(name) or 'missing'}" for name in names))


def _wanted(host: Host, extra: str = "") -> Iterator[Requirement]:
    """What the installed epserve asks for, by itself or with the extra."""
    for text in host.requirements("epserve"):
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        named = marker is not None and "extra" in str(marker)
        if named == bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            yield requirement
