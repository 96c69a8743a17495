"""Block sizes of the Triton products, by device and shape: `kernels/tuned/DEVICE.json`, which
`python -m bench.tune_moe` writes.

    {"bfloat16 e32 n4096 k7168": {"16": {"block_m": 16, ...}, "64": {...}}, ...}

Keys of the inner level are rows an expert; the nearest one counts. Shapes and devices that nobody
has tuned get what is right more often than not.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a grouped product is cut: rows, columns, sums; warps and pipeline stages a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def record(self) -> dict[str, int]:
        return asdict(self)


def blocks_for(
    device: torch.device, dtype: torch.dtype, num_experts: int, n: int, k: int, rows: int
) -> Blocks:
    """For `rows` rows an expert on average."""
    shapes = _table(device.type, device.index or 0).get(shape_key(dtype, num_experts, n, k))
    if not shapes:
        return default_blocks(dtype, rows)
    nearest = min(shapes, key=lambda tuned: (abs(tuned - rows), tuned))
    return shapes[nearest]


def default_blocks(dtype: torch.dtype, rows: int) -> Blocks:
    """Few rows: time goes with the bytes of the weights; many: with the matrix instructions."""
    is_fp8 = dtype == torch.float8_e4m3fn
    if rows <= 16:
        return Blocks(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=4)
    if rows <= 64:
        return Blocks(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4)
    return Blocks(
        block_m=128, block_n=128, block_k=128 if is_fp8 else 64, num_warps=8, num_stages=3
    )


def shape_key(dtype: torch.dtype, num_experts: int, n: int, k: int) -> str:
    return f"{str(dtype).removeprefix('torch.')} e{num_experts} n{n} k{k}"


def table_path(device_name: str) -> Path:
    """Where the block sizes of a device are kept."""
    return FOLDER / f"{device_name.replace(' ', '_')}.json"


@cache
def _table(device_type: str, index: int) -> dict[str, dict[int, Blocks]]:
    if device_type != "cuda":
        return {}
    path = table_path(torch.cuda.get_device_name(index))
    if not path.is_file():
        return {}
    return {
        shape: {int(rows): Blocks(**blocks) for rows, blocks in by_rows.items()}
        for shape, by_rows in json.loads(path.read_text(encoding="utf-8")).items()
    }
