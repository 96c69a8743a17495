"""Which cuts of FP8 products the tuners measure: pure functions of a product's shape."""

from collections.abc import Iterator

from kernels.build.fp8_gemm_blocks import (
    CONTIGUOUS,
    DENSE,
    MAX_STAGES_BYTES,
    MIN_GROUPS,
    Fp8Blocks,
    default_fp8_blocks,
)
from kernels.build.fp8_gemm_clusters import (
    MAX_CLUSTER,
    MAX_ROWS,
    MULTIPROCESSORS,
    ClusterBlocks,
    height_of,
)

MIN_CLUSTER_GROUPS = 4  # of 128 along K that a split is worth
MIN_STAGES = 3


def triton_cuts(layout: int, rows: int, n: int, k: int) -> Iterator[Fp8Blocks]:
    """What is worth measuring for a shape; the default comes first."""
    default = default_fp8_blocks(layout, rows, n, k)
    yield default
    few = 16 if rows <= 16 else 32 if rows <= 32 else 64
    cuts = [(128, 128, 2, False), (128, 128, 1, False), (64, 128, 2, False)]
    if rows <= 32 and layout != CONTIGUOUS:
        cuts = []
    if rows <= 128:
        cuts += [(few, 128, 1, True), (few, 64, 1, True), (128, 128, 1, True)]
    if 64 < rows <= 192:
        cuts += [(64, 128, 1, True), (128, 64, 1, True)]
    if layout == DENSE and rows > 192:
        # Small blocks, of which two run beside each other, are cut off less where N ends.
        cuts.append((128, 64, 1, False))
    if layout == CONTIGUOUS:
        cuts = cuts[:2]
    shared = layout == DENSE and rows <= 512
    seen = {default}
    for block_m, block_n, halves, swapped in cuts:
        for splits in (1, 2, 3, 4, 6, 8) if shared else (1,):
            for num_stages in (3, 4, 5, 7, 10):
                each = Fp8Blocks(
                    block_m=block_m, block_n=block_n, halves=halves, swapped=swapped,
                    splits=splits, num_warps=8 if block_m * block_n > 8192 else 4,
                    num_stages=num_stages,
                )  # fmt: skip
                if each not in seen and _is_triton_worth_it(each, rows, n, k):
                    seen.add(each)
                    yield each


def _is_triton_worth_it(blocks: Fp8Blocks, rows: int, n: int, k: int) -> bool:
    """Whether the stages fit, and shared sums are of some length and add programs that the device
    has room for."""
    if blocks.stage_bytes * blocks.num_stages > MAX_STAGES_BYTES:
        return False
    if blocks.num_stages > 5 and blocks.num_stages * blocks.splits > k // 128:
        return False
    if blocks.splits == 1:
        return True
    programs = -(-rows // blocks.block_m) * -(-n // (blocks.halves * blocks.block_n))
    fills = programs * blocks.splits <= 3 * MULTIPROCESSORS
    return fills and blocks.splits * MIN_GROUPS <= k // 128


def cluster_cuts(rows: int, n: int, k: int) -> Iterator[ClusterBlocks]:
    """What is worth measuring for a shape."""
    if rows > MAX_ROWS:
        return
    for warpgroups, across, per_multiprocessor, tokens_first in _cuts():
        for splits in range(1, MAX_CLUSTER // across + 1):
            each = ClusterBlocks(
                warpgroups=warpgroups, across=across, splits=splits,
                per_multiprocessor=per_multiprocessor, tokens_first=tokens_first,
            )  # fmt: skip
            if _is_cluster_worth_it(each, rows, n, k):
                yield each


def _cuts() -> Iterator[tuple[int, int, int, bool]]:
    """warpgroups, across, per_multiprocessor, tokens_first."""
    for warpgroups in (1, 2, 3):
        for across in (1, 2, 4):
            for per_multiprocessor in (1, 2, 3):
                yield warpgroups, across, per_multiprocessor, False
    yield 2, 1, 1, True


def _is_cluster_worth_it(blocks: ClusterBlocks, rows: int, n: int, k: int) -> bool:
    if height_of(rows) < 8 * blocks.across or blocks.splits * MIN_CLUSTER_GROUPS > k // 128:
        return False
    if blocks.tokens_first and rows <= MAX_ROWS // 2:
        return False
    if blocks.num_stages(rows, k) < MIN_STAGES:
        return False
    programs = -(-n // (64 * blocks.warpgroups)) * blocks.splits
    fills = programs <= 2.5 * MULTIPROCESSORS or blocks.splits == 1
    return fills and 2 * programs >= MULTIPROCESSORS
