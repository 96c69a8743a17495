"""The kernel of int4 products as it was, to be timed in turns with what it is.

Records of two runs differ by more than the code: by the host, and by the device's heat where power
binds. The function must have had the parameters that it has now, and weights their packed form.
"""

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from kernels.build.cuda_kernel import CudaKernel
from kernels.moe import w4a8_grouped_gemm_cuda as w4a8

_ROOT = Path(__file__).parents[1]


def at_revision(revision: str, folder: Path) -> CudaKernel:
    """Of the sources of that revision, which are written to `folder`. Raises ValueError where git
    does not have it."""
    done = subprocess.run(
        ("git", "archive", revision, "kernels"), cwd=_ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise ValueError(f"git does not give {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        sources = [each for each in archive if each.name.endswith((".cu", ".cuh"))]
        archive.extractall(folder, sources, filter="data")
    # In its room, or beside all others in revisions from before there were rooms.
    (source,) = (folder / "kernels").rglob("w4a8_grouped_gemm.cu")
    return w4a8.KERNEL.of(source)


@contextmanager
def launched(kernel: CudaKernel) -> Iterator[None]:
    """Int4 products are computed by it meanwhile, in graphs that are recorded then for ever."""
    with patch.object(w4a8, "KERNEL", kernel):
        yield
