"""Where nvcc and the headers of CUDA are: the extra `gpu` brings them, and so may a machine."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def cuda_home() -> Path | None:
    """What CUDA_HOME or CUDA_PATH says, or the folder that the extra has brought, or else the
    machine's; None without an nvcc in any."""
    return next((home for home in _candidates() if (home / "bin" / "nvcc").exists()), None)


def set_cuda_home() -> None:
    """For DeepGEMM and DeepEP, which look for it when they are imported, but not among packages."""
    home = cuda_home()
    if home is not None:
        os.environ["CUDA_HOME"] = str(home)


def _candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if told := os.environ.get(variable):
            yield Path(told)
    packages = find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("cu*"), reverse=True)
    yield Path("/usr/local/cuda")
    if found := shutil.which("nvcc"):
        yield Path(found).resolve().parents[1]
