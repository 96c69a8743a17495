"""Writes one file of a quantised checkpoint, tensor by tensor: no more than one is in memory."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

from core.errors import CheckpointError
from model.quantize.plan import Shard, Tensor, made_of
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import quantise_int4

PARTIAL_SUFFIX = ".partial"
_HASH_CHUNK_BYTES = 1 << 22
# What stands for an activation scale that was not measured; readers without one take it too.
INPUT_SCALE = 1.0

# Called with the bytes of the source that have been dealt with since the last call.
Progress = Callable[[int], None]


def write_shard(
    checkpoint: Checkpoint,
    shard: Shard,
    folder: Path,
    device: torch.device,
    progress: Progress,
) -> str:
    """Writes `folder / shard.name` and returns its SHA-256 in hexadecimal. The file has its name
    only once it is whole and on the disk.

    CheckpointError for a weight that is not finite; OSError as the disk gives it.
    """
    path = folder / shard.name
    partial = folder / (shard.name + PARTIAL_SUFFIX)
    header, offsets = _layout(shard)
    with partial.open("w+b") as file:
        file.write(header)
        file.truncate(len(header) + shard.num_bytes)

        def put(tensor: Tensor, value: torch.Tensor) -> None:
            _put(file, len(header) + offsets[tensor.name], tensor, value)

        for tensor in shard.copied:
            put(tensor, checkpoint.raw(tensor.name))
            progress(tensor.num_bytes)
        for name in shard.quantised:
            made = made_of(name, checkpoint.stored[name])
            for tensor, value in zip(made, _quantised(checkpoint, name, device), strict=True):
                put(tensor, value)
            progress(checkpoint.num_bytes(name))
        file.flush()
        os.fsync(file.fileno())
    digest = file_hash(partial)
    partial.rename(path)
    sync_folder(folder)
    return digest


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes new names in it outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _put(file: BinaryIO, offset: int, tensor: Tensor, value: torch.Tensor) -> None:
    raw = value.cpu().contiguous().reshape(-1).view(torch.uint8)
    assert raw.numel() == tensor.num_bytes, (tensor, tuple(value.shape), value.dtype)
    file.seek(offset)
    file.write(raw.numpy().data)


def _quantised(
    checkpoint: Checkpoint, name: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = checkpoint.read(name, torch.float32).to(device)
    try:
        values, scales = quantise_int4(weight)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {name}: {error}") from error
    return values, scales, torch.tensor(INPUT_SCALE)
