"""Which path computes an FP8 product, and how it is cut: what was measured on a device
(`kernels.build.tuned`), else the defaults of `kernels.build.fp8_gemm_blocks`."""

from collections.abc import Mapping

import torch

from kernels.build.fp8_gemm_blocks import DENSE, Fp8Blocks, Fp8Choice, default_fp8_blocks, shape_key
from kernels.build.fp8_gemm_clusters import MAX_ROWS, ClusterBlocks
from kernels.build.tuned import fp8_table


def fp8_blocks(device: torch.device, layout: int, rows: int, n: int, k: int) -> Fp8Blocks:
    choice = _measured(device, layout, rows, n, k)
    return choice.blocks if choice else default_fp8_blocks(layout, rows, n, k)


def faster_path(device: torch.device, layout: int, rows: int, n: int, k: int) -> str:
    """Where all are installed; DeepGEMM for shapes that were not measured."""
    choice = _measured(device, layout, rows, n, k)
    return choice.path if choice else "deep_gemm"


def cluster_blocks(device: torch.device, rows: int, n: int, k: int) -> ClusterBlocks | None:
    """None unless the CUDA path was measured to be faster than Triton for the dense product, with
    room for so many tokens."""
    if rows > min(MAX_ROWS, max(_table(device, DENSE, n, k), default=0)):
        return None
    choice = _measured(device, DENSE, rows, n, k)
    return choice.clusters if choice else None


def _measured(device: torch.device, layout: int, rows: int, n: int, k: int) -> Fp8Choice | None:
    """Of the nearest number of rows; of few rows of a dense product of the next one, since time
    goes in steps of the tokens that there is room for."""
    tuned = _table(device, layout, n, k)
    if not tuned:
        return None
    measured = sorted(tuned)
    if layout == DENSE and rows <= MAX_ROWS:
        measured = [each for each in measured if each >= rows] or measured
    return tuned[min(measured, key=lambda each: abs(each - rows))]


def _table(device: torch.device, layout: int, n: int, k: int) -> Mapping[int, Fp8Choice]:
    """By rows; nothing where the shape was not measured."""
    return fp8_table(device).get(shape_key(layout, n, k), {})
