"""What a quantisation has finished, kept beside its files so that it can be carried on.

A text file of JSON lines: first what is made from what, then one line a finished file. Its lock
is held while a process works in the folder.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Self, TextIO

from model.w4afp8 import QUANT_METHOD
from model.weights.checkpoint import Checkpoint

NAME = "quantize.journal"
# To be raised when the same source comes to give other bytes.
_VERSION = 2
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


class Busy(RuntimeError):
    """Another process works in the folder."""


class Foreign(ValueError):
    """The folder holds the beginning of something else."""


class Journal:
    """A context manager. Raises Busy or Foreign when opened."""

    def __init__(self, folder: Path, source: str) -> None:
        """`source` tells what is made, and from what, from anything else."""
        self._path = folder / NAME
        self._source = source
        self._file: TextIO | None = None
        self._hashes: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise Busy(f"another process works in {self._path.parent}") from error
        self._file.seek(0)
        whole = [line for line in self._file.read().splitlines(keepends=True) if line[-1] == "\n"]
        # A line that a kill has cut off counts for nothing.
        self._file.truncate(sum(len(line.encode()) for line in whole))
        if not whole:
            self._append({"source": self._source})
        elif json.loads(whole[0]).get("source") != self._source:
            self._file.close()
            raise Foreign(
                f"{self._path.parent} was begun from another checkpoint, or this one "
                "has changed since"
            )
        for line in whole[1:]:
            entry = json.loads(line)
            self._hashes[entry["shard"]] = entry["sha256"]
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def finished(self) -> dict[str, str]:
        """SHA-256 of the files that were finished, by name."""
        return dict(self._hashes)

    def add(self, shard: str, sha256: str) -> None:
        self._hashes[shard] = sha256
        self._append({"shard": shard, "sha256": sha256})

    def remove(self) -> None:
        """When nothing is left to carry on."""
        self._path.unlink()

    def _append(self, entry: dict[str, str]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def source_identity(checkpoint: Checkpoint) -> str:
    """Hash over config, headers, sizes and samples of the weights: reading them all would take as
    long as the rest."""
    digest = hashlib.sha256(f"{QUANT_METHOD} {_VERSION} ".encode())
    digest.update((checkpoint.folder / "config.json").read_bytes())
    for path in sorted({one.file for one in checkpoint.stored.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            stride = max((size - 8 - header_bytes) // _NUM_SAMPLES, _SAMPLE_BYTES)
            for offset in range(8 + header_bytes, size, stride):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
