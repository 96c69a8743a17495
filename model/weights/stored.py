"""Where the tensors of an HF-layout folder are: the headers of its safetensors files."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOAT_TYPES = ("F32", "BF16", "F16")
FP8_TYPE = "F8_E4M3"
SCALE_TYPES = (*FLOAT_TYPES, "F8_E8M0")  # the last: powers of two
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8_TYPE: torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Makes a tensor of this shape from all values that the file has of it, in one row.
Arrange: TypeAlias = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is, and what its header says; `arrange` for those that are read as tensors of
    another layout, of which `dtype` and `shape` are."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offsets: tuple[int, int]  # in the file, counted from the end of its header
    arrange: Arrange = torch.Tensor.view


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder by name, from the headers of its files."""
    if (folder / INDEX).is_file():
        weight_map = read_index(folder / INDEX)
        stored: dict[str, Stored] = {}
        for file in sorted(set(weight_map.values())):
            header = read_header(folder / file)
            stored |= {name: one for name, one in header.items() if weight_map.get(name) == file}
        absent = [name for name in weight_map if name not in stored]
        if absent:
            raise CheckpointError(f"{folder / INDEX} lists {absent[0]}, which its file lacks")
        return stored
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of tensors: {error!r}") from error
    # A name with a folder in it could point outside the checkpoint.
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(f"{path}: weight_map must give a file name for each tensor")
    return weight_map


def read_header(path: Path) -> dict[str, Stored]:
    """A safetensors file is: header length (8 bytes, little endian), header (JSON), data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), size)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((fields["data_offsets"][1] for fields in header.values()), default=0)
        stored = {
            name: Stored(
                path, fields["dtype"], tuple(fields["shape"]), tuple(fields["data_offsets"])
            )
            for name, fields in header.items()
        }
        is_sound = all(map(_fits_its_place, stored.values()))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is cut short or no safetensors file") from error
    if not is_sound:
        raise CheckpointError(f"{path} is no safetensors file: sizes do not fit shapes")
    if size < 8 + length + end:
        raise CheckpointError(f"{path} is cut short: {size} of {8 + length + end} bytes")
    return stored


def _fits_its_place(stored: Stored) -> bool:
    """Types that we do not read may be as they like."""
    begin, end = stored.offsets
    if stored.dtype not in DTYPES:
        return 0 <= begin <= end
    return 0 <= begin == end - DTYPES[stored.dtype].itemsize * math.prod(stored.shape)
