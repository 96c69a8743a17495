"""CUDA path of `kernels.gemm.router_gemm` for few tokens: built at first use, kept on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.build.cuda_kernel import NUMBER, POINTER, CudaKernel

SPLITS = 8  # thread blocks that share a sum: a cluster, of which more are not everywhere possible
EXPERTS = 64  # of a thread block
GROUP = 64  # of K
MAX_SHARED_BYTES = 227 * 1024
_KERNEL = CudaKernel(
    Path(__file__).with_name("router_gemm.cu"), POINTER, POINTER, POINTER, *[NUMBER] * 5
)
_OTHERWISE = "logits of the gate take their slower path"


@dataclass(frozen=True, slots=True)
class RouterCudaShape:
    """Tokens of a thread block, for which the kernel is compiled, and blocks that share a sum."""

    tokens: int
    splits: int = SPLITS


def shape_for(num_rows: int) -> RouterCudaShape:
    """More thread blocks than multiprocessors take longer than larger ones."""
    return RouterCudaShape(
        8 if num_rows <= 8 else 16 if num_rows <= 16 else 32 if num_rows <= 96 else 64
    )


def shared_bytes(shape: RouterCudaShape, groups: int) -> int:
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
        and _KERNEL.is_built(_OTHERWISE)
    )


def launch(
    hidden: torch.Tensor, weight: torch.Tensor, *, shape: RouterCudaShape | None = None
) -> torch.Tensor:
    """For operands that are possible. `shape`: another one than that of the number of rows, to
    measure it. Raises RuntimeError where it cannot be launched."""
    (num_rows, k), n = hidden.shape, weight.shape[0]
    out = hidden.new_empty(num_rows, n, dtype=torch.float32)
    if not num_rows:
        return out
    shape = shape or shape_for(num_rows)
    _KERNEL.launch(hidden.device, hidden, weight, out, num_rows, n, k, shape.tokens, shape.splits)
    return out
