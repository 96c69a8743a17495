"""CUDA path of `kernels.router_gemm` for few tokens: built at first use, kept on disk."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import cuda_build

SPLITS = 8  # thread blocks that share a sum: a cluster, of which more are not everywhere possible
EXPERTS = 64  # of a thread block
GROUP = 64  # of K
MAX_SHARED_BYTES = 227 * 1024
_SOURCE = Path(__file__).with_name("router_gemm.cu")
_OTHERWISE = "logits of the gate take their slower path"


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a thread block, for which the kernel is compiled, and blocks that share a sum."""

    tokens: int
    splits: int = SPLITS


def shape_for(num_rows: int) -> Shape:
    """More thread blocks than multiprocessors take longer than larger ones."""
    return Shape(8 if num_rows <= 8 else 16 if num_rows <= 16 else 32 if num_rows <= 96 else 64)


def shared_bytes(shape: Shape, groups: int) -> int:
    """Of a thread block: operands, of which 64 tokens' are where parts of sums are then received,
    those parts, and barriers."""
    steps = -(-groups // shape.splits)
    operands = steps * 2 * GROUP * (EXPERTS + shape.tokens)
    parts = -(-shape.tokens // 8 // shape.splits) * shape.splits * 2048
    together = max(operands, parts) if shape.tokens == 64 else operands + parts
    return together + 8 * (steps + 1)


def is_possible(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is there, and takes these operands: bfloat16, contiguous and
    aligned to 16 bytes, with K a multiple of 8 and room for a part of it."""
    k = hidden.shape[1]
    shape = shape_for(len(hidden))
    groups = -(-k // GROUP)
    return (
        k % 8 == 0
        and groups >= shape.splits
        and shared_bytes(shape, groups) <= MAX_SHARED_BYTES
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (hidden, weight))
        and cuda_build.is_built(_SOURCE, _OTHERWISE)
    )


def launch(
    hidden: torch.Tensor, weight: torch.Tensor, *, shape: Shape | None = None
) -> torch.Tensor:
    """For operands that are possible. `shape`: another one than that of the number of rows, to
    measure it. Raises RuntimeError where it cannot be launched."""
    (num_rows, k), n = hidden.shape, weight.shape[0]
    out = hidden.new_empty(num_rows, n, dtype=torch.float32)
    if not num_rows:
        return out
    shape = shape or shape_for(num_rows)
    with torch.cuda.device(hidden.device):
        message = _library().router_gemm_launch(
            hidden.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            n,
            k,
            shape.tokens,
            shape.splits,
            torch.cuda.current_stream().cuda_stream,
        )
    if message:
        raise RuntimeError(f"logits of {num_rows} x {n} x {k}, {shape}: {message.decode()}")
    return out


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(build()))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function = library.router_gemm_launch
    function.argtypes = [pointer, pointer, pointer, *[number] * 5, pointer]
    function.restype = ctypes.c_char_p
    return library


def build() -> Path:
    """The compiled library, built if the cache lacks it. Raises RuntimeError without nvcc."""
    return cuda_build.build(_SOURCE)
