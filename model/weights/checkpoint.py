"""Tensors of an HF-layout folder: one safetensors file, or several with an index.

Headers are read first and held against what the architecture needs, so that everything that is
missing, left over or misshapen is named before a byte of weight is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from core.errors import CheckpointError
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from model.config import ModelConfig
from model.w4afp8 import INT4_TYPES, int4_problem, is_routed_weight, weight_of_input_scale
from model.weights.tensor_names import SCALE_SUFFIX, Shapes, main_tensors, mtp_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUM_NAMED = 5  # tensors named in an error message; the rest are counted
FLOAT_TYPES = ("F32", "BF16", "F16")
FP8_TYPE = "F8_E4M3"
# Buffers that older writers stored and that are not read.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is, and what its header says."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offsets: tuple[int, int]  # in the file, counted from the end of its header


class Checkpoint:
    """Read access to the tensors of a folder. A context manager: files are closed at the end.
    `bytes_read` counts what was read of tensors, as stored."""

    bytes_read = 0

    def __init__(self, folder: str | Path) -> None:
        """Reads the headers. CheckpointError for an unreadable folder, index or file."""
        self.folder = Path(folder)
        self.stored = stored_tensors(self.folder)
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, from FP8 blocks where it is stored so."""
        if name not in self.stored:
            raise CheckpointError(f"{self.folder}: missing tensor {name}")
        value = self.raw(name)
        if self.stored[name].dtype == FP8_TYPE:
            return block_dequantise(value, self.raw(name + SCALE_SUFFIX), dtype)
        if self.is_int4(name):
            raise CheckpointError(f"{self.folder}: {name} is int4, unlike others of its layer")
        return value.to(dtype)

    def num_bytes(self, name: str) -> int:
        """As stored."""
        begin, end = self.stored[name].offsets
        return end - begin

    def is_int4(self, name: str) -> bool:
        return is_routed_weight(name) and self.stored[name].dtype in INT4_TYPES

    def is_fp8(self, name: str) -> bool:
        return name in self.stored and self.stored[name].dtype == FP8_TYPE

    def read_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K] float8_e4m3fn and [ceil(N / 128), ceil(K / 128)] float32 scales, as stored."""
        return self.raw(name), self.raw(name + SCALE_SUFFIX).float()

    def read_int4(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K / 2] int8 and [N, K / 128] scales of a routed expert's matrix, as stored."""
        if not self.is_int4(name):
            raise CheckpointError(f"{self.folder}: {name} is not int4, unlike others of its layer")
        return self.raw(name), self.raw(name + SCALE_SUFFIX)

    def raw(self, name: str) -> torch.Tensor:
        """As it is stored."""
        path = self.stored[name].file
        if path not in self._open:
            opened: Any = safe_open(path, framework="pt")
            self._open[path] = opened.__enter__()
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor

    def check(self, config: ModelConfig) -> None:
        """CheckpointError that names missing, unexpected and misshapen tensors."""
        needed = main_tensors(config)
        optional: Shapes = {}
        for depth in range(config.num_mtp_layers):
            for shapes in mtp_tensors(config, depth):
                optional |= shapes
        if config.tie_word_embeddings:
            optional["lm_head.weight"] = needed["model.embed_tokens.weight"]
        known = needed | optional
        missing = [name for name in needed if name not in self.stored]
        unexpected = [
            name
            for name in self.stored
            if weight_of_input_scale(name.removesuffix(SCALE_SUFFIX)) not in known
            and not name.endswith(IGNORED_SUFFIX)
        ]
        wrong = [
            problem
            for name, shape in known.items()
            if name in self.stored and (problem := self._problem(name, shape))
        ]
        self._report(missing=missing, unexpected=unexpected, wrong=wrong)

    def check_mtp(self, config: ModelConfig, depth: int) -> None:
        """CheckpointError unless MTP layer `depth` is whole."""
        if depth >= config.num_mtp_layers:
            raise CheckpointError(
                f"{self.folder}: no MTP layer {depth}, config.json has {config.num_mtp_layers}"
            )
        needed, _ = mtp_tensors(config, depth)
        self._report(missing=[name for name in needed if name not in self.stored])

    def _problem(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with a stored tensor, or nothing."""
        stored = self.stored[name]
        scale = self.stored.get(name + SCALE_SUFFIX)
        if self.is_int4(name) and (scale is None or scale.dtype in FLOAT_TYPES):
            return int4_problem(name, stored.shape, None if scale is None else scale.shape, shape)
        if stored.shape != shape:
            return f"{name} is {list(stored.shape)}, not {list(shape)}"
        if stored.dtype in FLOAT_TYPES and scale is None:
            return ""
        if stored.dtype != FP8_TYPE:
            return f"{name} has dtype {stored.dtype}"
        if scale is None:
            return f"{name} is FP8 without {name + SCALE_SUFFIX}"
        blocks = tuple(-(-size // BLOCK) for size in shape)
        if scale.shape != blocks or scale.dtype not in FLOAT_TYPES:
            return (
                f"{name + SCALE_SUFFIX} is {scale.dtype} {list(scale.shape)}, "
                f"not floats {list(blocks)}"
            )
        return ""

    def _report(self, **problems: Sequence[str]) -> None:
        parts = []
        for kind, items in problems.items():
            if items:
                more = f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else ""
                listed = ", ".join(sorted(items)[:NUM_NAMED])
                parts.append(f"{len(items)} {kind}: {listed}{more}")
        if parts:
            raise CheckpointError(f"{self.folder}: tensors do not fit; " + "; ".join(parts))


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
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is cut short or no safetensors file") from error
    if size < 8 + length + end:
        raise CheckpointError(f"{path} is cut short: {size} of {8 + length + end} bytes")
    return stored
