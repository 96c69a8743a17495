"""Block sizes of the Triton products, by device and shape: `kernels/tuned/DEVICE.json`, which
`python -m bench.tune_fused_moe` and `python -m bench.tune_fp8_gemm` write.

    {"device": {"capability": 90, "multiprocessors": 132, "memory_gib": 140},
     "fused_moe": {"bfloat16 e32 n4096 k7168": {"16": {"block_m": 16, ...}, "64": {...}}, ...},
     "fp8_gemm": {"dense n7168 k16384": {"64": {"block_m": 64, ...}, ...}, ...}}

Keys of the innermost level are rows (of an expert, where there are experts); the nearest one
counts. A device without a table of its own takes that of the most similar device of its compute
capability, else defaults, which is said once in the log.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.build.fp8_gemm_blocks import Fp8Choice

FOLDER = Path(__file__).parents[1] / "tuned"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a grouped product is cut: rows, columns, sums; warps and pipeline stages a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def blocks_for(
    device: torch.device, dtype: torch.dtype, num_experts: int, n: int, k: int, rows: int
) -> Blocks:
    """For `rows` rows an expert on average."""
    shapes = moe_table(device).get(shape_key(dtype, num_experts, n, k))
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
def moe_table(device: torch.device) -> dict[str, dict[int, Blocks]]:
    """What was measured for grouped products on `device`, by shape and rows."""
    return {
        shape: {int(rows): Blocks(**blocks) for rows, blocks in by_rows.items()}
        for shape, by_rows in _section("fused_moe", device).items()
    }


@cache
def fp8_table(device: torch.device) -> dict[str, dict[int, Fp8Choice]]:
    """What was measured for FP8 products on `device`, by shape and rows."""
    return {
        shape: {int(rows): Fp8Choice.of_record(record) for rows, record in by_rows.items()}
        for shape, by_rows in _section("fp8_gemm", device).items()
    }


def _section(name: str, device: torch.device) -> dict[str, dict[str, Any]]:
    if device.type != "cuda":
        return {}
    own = table_path(torch.cuda.get_device_name(device))
    table, tuned_for = read_table(own), own
    if name not in table and (nearest := nearest_table(device_facts(device), name)):
        table, tuned_for = read_table(nearest), nearest
    if name not in table:
        _log.info("no %s block sizes were tuned for this device (%s): defaults", name, own.name)
    elif tuned_for != own:
        _log.info("%s block sizes of %s count for this device (%s)", name, tuned_for.stem, own.stem)
    return table.get(name, {})


def device_facts(device: torch.device) -> dict[str, int]:
    """What decides how similar two devices are."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "capability": 10 * properties.major + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
    }


def nearest_table(facts: Mapping[str, int], name: str) -> Path | None:
    """The file with section `name` of the device of the same compute capability that has about as
    many multiprocessors and, among equals, as much memory, which bandwidth goes with."""
    found: list[tuple[int, int, Path]] = []
    for path in FOLDER.glob("*.json"):
        table = read_table(path)
        other = table["device"]
        if name in table and other["capability"] == facts["capability"]:
            differences = (
                abs(other[each] - facts[each]) for each in ("multiprocessors", "memory_gib")
            )
            found.append((*differences, path))
    return min(found)[-1] if found else None


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a file; none when it does not exist. Raises ValueError for other contents."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError(f"{path} is no table of block sizes")
    return table
