"""Makes the files of a quantised checkpoint, piece by piece.

Where each tensor of a file will lie is known before a weight is read, so pieces are written in any
order, by any number of processes. A file has its name only once it is whole and on the disk.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from core.errors import CheckpointError
from model.config import ModelConfig
from model.quantize.plan import Shard, Tensor, made_of, plan_shards
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import quantise_int4
from model.weights.tensor_names import SCALE_SUFFIX

PARTIAL_SUFFIX = ".partial"
# Of the source, which a process reads while it works on what it has of it.
PIECE_BYTES = 64 << 20
_HASH_CHUNK_BYTES = 1 << 22
# What stands for an activation scale that was not measured; readers without one take it too.
INPUT_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """`write` some tensors of a shard (names as in the source), `finish` one whose tensors are all
    written, or `hash` one that is finished. The last two give its SHA-256 in hexadecimal."""

    verb: Literal["write", "finish", "hash"]
    shard: str
    names: tuple[str, ...] = ()
    num_bytes: int = 0  # of the source


class ShardMaker:
    """What one process does jobs with. CheckpointError, of construction too, and OSError."""

    def __init__(self, model: Path, output: Path, device: str) -> None:
        self.checkpoint = Checkpoint(model, device)
        self.shards = {
            shard.name: shard
            for shard in plan_shards(self.checkpoint, ModelConfig.from_folder(model))
        }
        self._output = output
        self._device = torch.device(device)

    def close(self) -> None:
        self.checkpoint.close()

    def pieces(self, shard: Shard) -> Iterator[Job]:
        """All that is to be written of a shard."""
        names: list[str] = []
        num_bytes = 0
        for name in (*(tensor.name for tensor in shard.copied), *shard.quantised):
            names.append(name)
            num_bytes += self.checkpoint.num_bytes(name)
            if num_bytes >= PIECE_BYTES:
                yield Job("write", shard.name, tuple(names), num_bytes)
                names, num_bytes = [], 0
        if names:
            yield Job("write", shard.name, tuple(names), num_bytes)

    def do(self, job: Job) -> str:
        """CheckpointError for a weight that is not finite, and where the device cannot go on;
        OSError as the disk gives it, with a file's name."""
        try:
            if job.verb == "hash":
                return _file_hash(self._output / job.shard)
            if job.verb == "finish":
                return self._finish(self.shards[job.shard])
            self._write(self.shards[job.shard], job.names)
        except OSError as error:
            where = error.filename or str(self._output / job.shard)
            raise OSError(error.errno, error.strerror, where) from error
        except (RuntimeError, MemoryError) as error:  # of torch: no memory, a GPU out of order
            raise CheckpointError(f"{job.shard} on {self._device}: {error}") from error
        return ""

    def _write(self, shard: Shard, names: tuple[str, ...]) -> None:
        header, offsets = _layout(shard)
        quantised, stored = set(shard.quantised), self.checkpoint.stored
        self.checkpoint.read_ahead(
            [
                each
                for name in names
                for each in ((name, name + SCALE_SUFFIX) if name in quantised else (name,))
                if each in stored
            ]
        )
        file = os.open(self._partial(shard), os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            for name in names:
                if name in quantised:
                    made = zip(made_of(name, stored[name]), self._quantised(name), strict=True)
                else:
                    copied = Tensor(name, stored[name].dtype, stored[name].shape)
                    made = zip((copied,), (self.checkpoint.raw(name),), strict=True)
                for tensor, value in made:
                    _put(file, len(header) + offsets[tensor.name], tensor, value)
        finally:
            os.close(file)

    def _quantised(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        read = self.checkpoint
        weight, *scales = read.read_fp8(name) if read.is_fp8(name) else (read.raw(name),)
        try:
            values, steps = quantise_int4(weight, *scales)
        except ValueError as error:
            raise CheckpointError(f"{self.checkpoint.folder}: {name}: {error}") from error
        return values, steps, torch.tensor(INPUT_SCALE)

    def _finish(self, shard: Shard) -> str:
        header, _ = _layout(shard)
        partial = self._partial(shard)
        with partial.open("r+b") as file:
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        digest = _file_hash(partial)
        partial.rename(self._output / shard.name)
        sync_folder(self._output)
        # Its source is not needed again.
        self.checkpoint.close()
        return digest

    def _partial(self, shard: Shard) -> Path:
        return self._output / (shard.name + PARTIAL_SUFFIX)


def remove_partial(folder: Path) -> None:
    """What an interruption has left half-written."""
    for path in folder.glob("*" + PARTIAL_SUFFIX):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Makes new names in it outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; "" for one that is not there."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def _layout(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where after it each tensor begins."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for tensor in shard.tensors:
        begin, end = end, end + tensor.num_bytes
        offsets[tensor.name] = begin
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, offsets


def _put(file: int, offset: int, tensor: Tensor, value: torch.Tensor) -> None:
    raw = value.cpu().contiguous().reshape(-1).view(torch.uint8)
    assert raw.numel() == tensor.num_bytes, (tensor, tuple(value.shape), value.dtype)
    left = memoryview(raw.numpy())
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
