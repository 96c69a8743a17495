"""Scales of activations in FP8 (e4m3): what they are, and where they lie in memory.

One for 128 values of a row, [..., rows, K / 128] float32. Rows are contiguous in memory, as matrix
products on Hopper fetch them, their number padded to a multiple of 4.
"""

from typing import TypeAlias

import torch

# x, its scales, weights, their scales: of a product, as `kernels.gemm.fp8_gemm` has them.
Fp8Operands: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
GROUP = 128
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-12  # values that are all zero still need a scale


def empty_scales(x: torch.Tensor) -> torch.Tensor:
    """Of x [..., rows, K]: [..., rows, K / 128], nothing in them yet."""
    *lead, num_rows, width = x.shape
    padded = -(-num_rows // 4) * 4
    scales = x.new_empty(*lead, width // GROUP, padded, dtype=torch.float32)
    return scales.transpose(-1, -2)[..., :num_rows, :]
