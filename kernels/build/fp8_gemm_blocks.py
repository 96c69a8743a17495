"""How `kernels.gemm.fp8_gemm_triton` cuts a product, as pure functions of its shape."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kernels.build.fp8_gemm_clusters import MULTIPROCESSORS, ClusterBlocks

DENSE, MASKED, CONTIGUOUS, ALIGNED = 0, 1, 2, 3
LAYOUTS = ("dense", "masked", "contiguous", "aligned")
MIN_GROUPS = 8  # of 128 along K that a split is worth
MAX_STAGES_BYTES = 227 * 1024 - 1024  # the rest is for barriers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks:
    """`block_m` tokens and `halves` x `block_n` rows of weights a program, whose first operand are
    the weights when `swapped`; `splits` programs share a sum. Splits are for dense products only;
    two halves need block_n = 128 and are not swapped."""

    block_m: int
    block_n: int
    halves: int
    swapped: bool
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.halves == 2 and (self.swapped or self.block_n != 128):
            raise ValueError(f"two halves are 128 columns each and not swapped: {self}")
        if self.block_n not in (64, 128) or self.halves not in (1, 2) or self.splits < 1:
            raise ValueError(f"blocks that no kernel has: {self}")

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of the pipeline."""
        return 128 * (self.block_m + self.halves * self.block_n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Choice:
    """What was measured for a shape: which of DeepGEMM, the CUDA kernel and Triton won, and what
    counts where DeepGEMM is not installed: Triton's best cut, and the CUDA kernel's where that was
    faster than Triton."""

    path: str
    blocks: Fp8Blocks
    clusters: ClusterBlocks | None = None

    def __post_init__(self) -> None:
        if self.path not in ("cuda", "deep_gemm", "triton"):
            raise ValueError(f"no path of FP8 products: {self.path!r}")
        if self.path == "cuda" and self.clusters is None:
            raise ValueError("the CUDA kernel won without a cut")

    def record(self) -> dict[str, Any]:
        record = {"path": self.path} | asdict(self.blocks)
        return record | ({"clusters": asdict(self.clusters)} if self.clusters else {})

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Fp8Choice":
        blocks = dict(record)
        path, clusters = blocks.pop("path"), blocks.pop("clusters", None)
        return cls(
            path=path,
            blocks=Fp8Blocks(**blocks),
            clusters=ClusterBlocks(**clusters) if clusters else None,
        )


def default_fp8_blocks(layout: int, rows: int, n: int, k: int) -> Fp8Blocks:
    """For `rows` tokens, of an expert where there are several."""
    if layout == CONTIGUOUS or rows > 64:
        return _many(layout, rows, n, k)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    splits = 1
    if layout == DENSE:
        # Two programs fit on a multiprocessor.
        splits = _splits(-(-n // 128), 2 * MULTIPROCESSORS, k)
    return Fp8Blocks(
        block_m=block_m, block_n=128, halves=1, swapped=True, splits=splits, num_warps=4,
        num_stages=5 if block_m == 16 else 4,
    )  # fmt: skip


def _many(layout: int, rows: int, n: int, k: int) -> Fp8Blocks:
    row_blocks = -(-rows // 128)
    # Narrow blocks where wide ones would leave multiprocessors idle.
    is_wide = layout != DENSE or row_blocks * -(-n // 256) >= MULTIPROCESSORS
    halves = 2 if is_wide else 1
    blocks = row_blocks * -(-n // (128 * halves))
    return Fp8Blocks(
        block_m=128, block_n=128, halves=halves, swapped=False,
        splits=_splits(blocks, MULTIPROCESSORS, k) if layout == DENSE else 1,
        num_warps=8, num_stages=4,
    )  # fmt: skip


def _splits(blocks: int, slots: int, k: int) -> int:
    """As many as fill the device once and leave each a sum of some length."""
    most = max(1, (k // 128) // MIN_GROUPS)
    return max(1, min(most, slots // blocks, 8))


def shape_key(layout: int, n: int, k: int) -> str:
    return f"{LAYOUTS[layout]} n{n} k{k}"
