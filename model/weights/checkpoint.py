"""Tensors of an HF-layout folder: one safetensors file, or several with an index.

Headers are read first and held against what the architecture needs, so that everything that is
missing, left over or misshapen is named before a byte of weight is loaded.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import CheckpointError
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from model.config import ModelConfig
from model.w4afp8 import INT4_TYPES, int4_problem, is_routed_weight, weight_of_input_scale
from model.weights.file_reader import FileReader, Reading
from model.weights.read_ahead import ReadAhead
from model.weights.tensor_names import SCALE_SUFFIX, Shapes, main_tensors, mtp_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUM_NAMED = 5  # tensors named in an error message; the rest are counted
FLOAT_TYPES = ("F32", "BF16", "F16")
FP8_TYPE = "F8_E4M3"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8_TYPE: torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
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
    `bytes_read` counts what was read of tensors, as stored, of `bytes_planned`."""

    bytes_read = 0
    bytes_planned = 0

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        """Reads the headers; tensors will be on `device`. CheckpointError for an unreadable folder,
        index or file."""
        self.folder = Path(folder)
        self.stored = stored_tensors(self.folder)
        self._reader = FileReader(torch.device(device))
        self._ahead = ReadAhead(self._start, self.num_bytes)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    def read_ahead(self, names: Collection[str]) -> None:
        """From now on these are read before they are asked for, each once and in this order."""
        self.bytes_planned = sum(map(self.num_bytes, names))
        self._ahead.plan(names)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor, from FP8 blocks where it is stored so."""
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
        """As it is stored, waited for. CheckpointError when the file cannot be read."""
        stored = self.stored[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{self.folder}: {name} has dtype {stored.dtype}")
        data = self._ahead.take(name)
        self.bytes_read += data.nbytes
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

    def _start(self, name: str) -> Reading:
        """Single numbers stay on the host, which looks at them."""
        stored = self.stored[name]
        begin, end = stored.offsets
        return self._reader.start(stored.file, begin, end - begin, on_host=not stored.shape)

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
