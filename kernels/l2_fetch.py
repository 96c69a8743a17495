"""Bytes into a GPU's second-level cache, ahead of the kernel that reads them.

Nothing changes but how long that takes, so the reference does nothing. Where memory has nothing
else to do while the kernels in front run, its first reads then hit the cache; where it has, this
costs what it saves. Elsewhere than on Hopper, and without nvcc, nothing is fetched.
"""

import ctypes
import functools
from pathlib import Path

import torch

from kernels import cuda_build
from kernels.paths import path_of

_SOURCE = Path(__file__).with_name("l2_fetch.cu")
_OTHERWISE = "weights are not fetched ahead"


def l2_fetch(rows: torch.Tensor, num_bytes: int) -> None:
    """Enqueues, on the current stream, the first `num_bytes` of each row.

    rows  [N, B] uint8, a row's bytes contiguous, rows and `num_bytes` multiples of 16 bytes

    Raises ValueError for others."""
    has_rows = rows.dtype == torch.uint8 and rows.dim() == 2 and rows.stride(1) == 1
    if not has_rows or rows.data_ptr() % 16 or rows.stride(0) % 16 or num_bytes % 16:
        raise ValueError(f"rows to fetch: {rows.dtype} {tuple(rows.shape)}, {num_bytes} bytes")
    if not 0 <= num_bytes <= rows.shape[1]:
        raise ValueError(f"{num_bytes} bytes of rows of {rows.shape[1]}")
    if not rows.numel() or path_for(rows.device) == "reference":
        return
    with torch.cuda.device(rows.device):
        stream = torch.cuda.current_stream().cuda_stream
        message = _library().l2_fetch_launch(
            rows.data_ptr(), rows.stride(0), len(rows), num_bytes, stream
        )
    if message:
        raise RuntimeError(f"fetching {tuple(rows.shape)}: {message.decode()}")


def path_for(device: torch.device) -> str:
    """The path on `device`."""
    path = path_of("l2_fetch", device)
    is_there = path == "cuda" and cuda_build.is_built(_SOURCE, _OTHERWISE)
    return "cuda" if is_there else "reference"


def build() -> Path:
    """The compiled library, built if the cache lacks it. Raises RuntimeError without nvcc."""
    return cuda_build.build(_SOURCE)


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(build()))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function = library.l2_fetch_launch
    function.argtypes = [pointer, ctypes.c_longlong, number, number, pointer]
    function.restype = ctypes.c_char_p
    return library
