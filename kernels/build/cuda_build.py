"""CUDA C++ sources to libraries: built at first use by nvcc for Hopper, kept on disk.

A library is cached under the hash of its source and of the headers that it includes, in the folder
that `core.kernel_caches` names. Of those that need it at once, one builds it.
"""

import fcntl
import functools
import hashlib
import logging
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.cuda_home import cuda_home
from core.kernel_caches import own_kernels

_FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-Xcompiler=-fPIC",
)
_log = logging.getLogger(__name__)
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def sources() -> list[Path]:
    """All there are."""
    return sorted(Path(__file__).parents[1].glob("*/*.cu"))


def build(source: Path) -> Path:
    """The compiled library, built if the cache lacks it. Raises RuntimeError without nvcc, OSError
    where the cache cannot be written."""
    contents = [each.read_bytes() for each in _with_headers(source)]
    digest = hashlib.sha256(b"\0".join([*contents, " ".join(_FLAGS).encode()])).hexdigest()[:16]
    target = own_kernels() / f"{source.stem}-{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.exists():  # built while this one waited
            return target
        built = Path(folder) / target.name
        command = [*_nvcc(source), *_FLAGS, "-o", str(built), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")
        built.replace(target)
    return target


@functools.cache
def is_built(source: Path, otherwise: str) -> bool:
    """Whether `build` gives a library. Where not, a warning says, once, what happens `otherwise`
    and why."""
    try:
        build(source)
    except (OSError, RuntimeError) as error:
        _log.warning("%s: %s", otherwise, error)
        return False
    return True


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Of all processes and threads; those of one that ends let go."""
    with target.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _with_headers(source: Path) -> list[Path]:
    """The source and every header that it names in quotes, or that these name."""
    found = [source]
    for each in found:
        names = _INCLUDE.findall(each.read_text(encoding="utf-8"))
        headers = [(each.parent / name).resolve() for name in names]
        found.extend(header for header in dict.fromkeys(headers) if header not in found)
    return found


def _nvcc(source: Path) -> list[str]:
    """It, and where the libraries are that it links: its own idea is that of a whole toolkit."""
    home = cuda_home()
    if home is None:
        raise RuntimeError(
            f"{source.name} is compiled at first use and needs nvcc: pip install 'epserve[gpu]', "
            "or install CUDA and set CUDA_HOME, or set EPSERVE_KERNELS=reference"
        )
    return [str(home / "bin" / "nvcc"), f"-L{home / 'lib'}"]
