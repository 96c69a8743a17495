"""What kernels are compiled with at first use on a machine with GPUs, and where they are kept."""

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from core.kernel_caches import deep_gemm_kernels, own_kernels, triton_kernels
from ctl.base.host import Host
from ctl.doctor.finding import Finding, missing, note, ok, warning

_LEAST_NVCC = (12, 9)  # of DeepGEMM
_IN_MEMORY = ("tmpfs", "ramfs")
# The variable that moves it, and what it keeps.
_CACHES = (
    ("EPSERVE_CACHE", own_kernels),
    ("TRITON_CACHE_DIR", triton_kernels),
    ("DG_JIT_CACHE_DIR", deep_gemm_kernels),
)


def check_compilers(host: Host) -> Iterator[Finding]:
    """Triton compiles a launcher in C for each kernel; nvcc takes C++ apart with g++."""
    told = os.environ.get("CC")
    found = host.which(told) if told else host.which("gcc") or host.which("clang")
    if found:
        yield ok("C compiler", found)
    else:
        detail = f"CC={told} is not there" if told else "neither gcc nor clang is there"
        advice = "Triton stops at its first kernel without one: apt install gcc."
        yield missing("C compiler", detail, advice)
    folder = _python_headers()
    if "Python.h" in host.names(folder):
        yield ok("Python headers", folder)
    else:
        advice = "Triton stops at its first kernel without them: apt install python3-dev."
        yield missing("Python headers", f"no Python.h in {folder}", advice)


def check_nvcc(host: Host, home: Path | None) -> Iterator[Finding]:
    """`home`: what `cuda_home` gives."""
    if home is None:
        advice = "pip install 'epserve[gpu]', or install CUDA and set CUDA_HOME."
        detail = "not there: neither DeepGEMM's kernels nor ours in CUDA C++ can be compiled"
        yield missing("nvcc", detail, advice)
        return
    program = home / "bin" / "nvcc"
    release = re.search(r"release (\d+)\.(\d+)", host.run(str(program), "--version"))
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    detail = f"{version[0]}.{version[1]}, {program}"
    if version < _LEAST_NVCC:
        advice = f"DeepGEMM wants {_LEAST_NVCC[0]}.{_LEAST_NVCC[1]}: pip install 'epserve[gpu]'."
        yield missing("nvcc", detail, advice)
    elif not host.which("g++"):
        yield missing("nvcc", f"{detail}, without g++", "It calls g++: apt install g++.")
    else:
        yield ok("nvcc", detail)


def check_caches(host: Host) -> Iterator[Finding]:
    """Whether kernels that were compiled are there at the next start."""
    mounts = [line.split()[1:3] for line in host.read("/proc/mounts").splitlines()]
    for variable, folder in _CACHES:
        yield _check_cache(variable, folder().expanduser(), mounts)


def _check_cache(variable: str, folder: Path, mounts: list[list[str]]) -> Finding:
    try:
        sizes = [each.stat().st_size for each in folder.rglob("*") if each.is_file()]
        there = next(each for each in (folder, *folder.parents) if each.exists())
    except OSError as error:
        advice = f"Set {variable} to another folder."
        return missing(variable, f"{folder}: {error.strerror}", advice)
    held = f"{len(sizes)} files, {decimal(sum(sizes))}" if sizes else "nothing yet"
    detail = f"{folder}: {held}"
    if not (there.is_dir() and os.access(there, os.W_OK)):
        advice = f"What it lacks cannot be kept: set {variable} to a folder that can be written to."
        # What has files may have all it needs, as that of the image has.
        return (note if sizes else missing)(variable, f"{detail}, not writable", advice)
    if _file_system(there, mounts) in _IN_MEMORY:
        advice = f"The next start compiles all again: set {variable} to a folder on a volume."
        return warning(variable, f"{detail}, in memory", advice)
    if not sizes:
        return note(variable, detail, "The first start compiles for minutes.")
    return ok(variable, detail)


def _file_system(folder: Path, mounts: list[list[str]]) -> str:
    """The type of the one that it lies on."""
    place = folder.resolve()
    above = [(len(point), kind) for point, kind in mounts if place.is_relative_to(point)]
    return max(above, default=(0, ""))[1]


def _python_headers() -> str:
    # Debian's own scheme names a folder that they are not in.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return sysconfig.get_paths(scheme=scheme)["include"]
