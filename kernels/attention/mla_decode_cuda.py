"""CUDA path of absorbed attention for Hopper: bfloat16, pages of 64 tokens, 512 + 64 wide, a
multiple of 64 heads.

Built at first use and kept by `cuda_build`. `kv_lengths`, `block_table` and the cache, but for the
new tokens of each row, are read while earlier kernels still run: none of them may be written by a
kernel that lets the next one begin early.
"""

import functools
from pathlib import Path

import torch

from kernels.attention.mla_decode_splits import MAX_QUERIES, TOKENS, Splits
from kernels.build.cuda_kernel import FLOAT, LONG, NUMBER, POINTER, CudaKernel
from kernels.build.operands import check_contiguous

LINES, VALUE_DIM, WIDTH = 64, 512, 576
MIN_TILES = 2  # of a part: fewer are not worth a split of their own
_OTHERWISE = "attention at decode takes its slower path"
_KERNEL = CudaKernel(
    Path(__file__).with_name("mla_decode.cu"), *[POINTER] * 6, LONG, *[NUMBER] * 6, FLOAT
)


def takes(query: torch.Tensor, cache: torch.Tensor, value_dim: int) -> bool:
    """Whether there is a kernel for these arguments of `mla_decode`, they are on a Hopper, and
    there is nvcc for it."""
    return fits(query, cache, value_dim) and _is_hopper(query.device) and is_built()


def fits(query: torch.Tensor, cache: torch.Tensor, value_dim: int) -> bool:
    return (
        query.dtype == torch.bfloat16
        and cache.shape[1:] == (TOKENS, WIDTH)
        and value_dim == VALUE_DIM
        and query.shape[1] % LINES == 0
        and len(query) > 0
    )


def is_built() -> bool:
    return _KERNEL.is_built(_OTHERWISE)


def launch(
    query: torch.Tensor,  # [B * Q, heads, 576]
    cache: torch.Tensor,  # [pages, 64, 576]
    block_table: torch.Tensor,  # [B, P] int32
    kv_lengths: torch.Tensor,  # [B] int32, the new tokens included; 0: no row
    *,
    scale: float,
    num_parts: int | None = None,
    min_tiles: int = MIN_TILES,
) -> Splits:
    """`num_parts`: others than as many as run at once. Raises RuntimeError where the kernel cannot
    be built or launched."""
    num_tokens, num_heads, _ = query.shape
    num_rows = len(kv_lengths)
    num_queries = num_tokens // num_rows
    if num_queries * num_rows != num_tokens or num_queries > MAX_QUERIES:
        raise ValueError(f"{num_tokens} tokens are not up to {MAX_QUERIES} for {num_rows} rows")
    check_contiguous(query=query, cache=cache, kv_lengths=kv_lengths)
    assert block_table.stride(1) == 1
    num_lines = num_queries * num_heads
    num_parts = num_parts or max(1, _num_multiprocessors(query.device) // (num_lines // LINES))
    num_places = num_rows + num_parts
    values = query.new_empty(num_places, num_lines, VALUE_DIM)
    lse = query.new_empty(num_places, num_lines, dtype=torch.float32)
    _KERNEL.launch(
        query.device, query, cache, block_table, kv_lengths, values, lse, cache.shape[0] * TOKENS,
        num_rows, num_queries, num_heads, block_table.stride(0), num_parts, min_tiles, scale,
    )  # fmt: skip
    return Splits(
        values=values, lse=lse, kv_lengths=kv_lengths, num_parts=num_parts, min_tiles=min_tiles,
        num_queries=num_queries,
    )  # fmt: skip


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
