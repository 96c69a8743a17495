"""Reads parts of safetensors files into tensors, with several threads.

    reader = FileReader(device)
    reading = reader.start(path, begin, num_bytes)     # returns at once
    data = reading.result()                            # [num_bytes] uint8 on the device

One thread has one read under way, and a disk, above all one behind a network, is only fast with
many; so is the copy from the page cache. For a GPU each thread reads into pinned memory, from which
the device takes it, on a stream of its own, while the thread goes on to read and other streams to
compute. Files are read through the page cache: what several ranks of a node read at about the same
time comes from the disk once.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from core.errors import CheckpointError

NUM_THREADS = 8
# What a thread reads at once. Of pinned memory there are two as many as threads.
CHUNK_BYTES = 8 << 20

# Of a file and its descriptor, from an offset, into a tensor.
Fill = Callable[[Path, int, int, torch.Tensor], torch.cuda.Event | None]


@dataclass(slots=True)
class Reading:
    """Bytes on their way."""

    data: torch.Tensor
    chunks: Sequence["Future[torch.cuda.Event | None]"]

    def result(self) -> torch.Tensor:
        """[num_bytes] uint8, once all are there; on a GPU for what the current stream is given from
        now on. CheckpointError when the file cannot be read."""
        for chunk in self.chunks:
            copied = chunk.result()
            if copied is not None:
                torch.cuda.current_stream(self.data.device).wait_event(copied)
        self.chunks = ()
        return self.data


class FileReader:
    """`start` from one thread. Nothing is opened, allocated or started before it is called, nor
    between `close` and the next call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        self._staging: _Staging | None = None

    def start(self, path: Path, begin: int, num_bytes: int, *, on_host: bool = False) -> Reading:
        """`begin` counts from the end of the file's header."""
        device = torch.device("cpu") if on_host else self._device
        handle, data_begin = self._open(path)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "weights")
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        read = partial(_fill if data.is_cpu else self._staged(), path, handle)
        offset = data_begin + begin
        # Of one size: a small one would cost as much.
        size = -(-num_bytes // max(1, -(-num_bytes // CHUNK_BYTES)))
        chunks = [
            self._threads.submit(read, offset + begin, data[begin : begin + size])
            for begin in range(0, num_bytes, size or 1)
        ]
        return Reading(data, chunks)

    def close(self) -> None:
        """What is on its way is given up."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for handle, _ in self._files.values():
            os.close(handle)
        self._files.clear()
        self._threads = self._staging = None

    def _open(self, path: Path) -> tuple[int, int]:
        """A descriptor, and where the header ends."""
        if path not in self._files:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                length = int.from_bytes(os.pread(handle, 8, 0), "little")
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            self._files[path] = handle, 8 + length
        return self._files[path]

    def _staged(self) -> Fill:
        """To memory of the device that this thread has just allocated."""
        if self._staging is None:
            self._staging = _Staging(self._device, 2 * NUM_THREADS)
        # What was there before may still be in use.
        self._staging.stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._staging.fill


class _Staging:
    """Pinned memory of some chunks, and the stream on which the device takes what is in it."""

    def __init__(self, device: torch.device, num_chunks: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._free: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(num_chunks):
            memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put((memory, torch.cuda.Event(blocking=True)))

    def fill(self, path: Path, handle: int, offset: int, out: torch.Tensor) -> torch.cuda.Event:
        """`out` [bytes] uint8 on the device is written before what comes after the event."""
        memory, copied = self._free.get()
        try:
            copied.synchronize()  # what was in it is taken
            part = memory[: len(out)]
            _fill(path, handle, offset, part)
            with torch.cuda.stream(self.stream):
                out.copy_(part, non_blocking=True)
                # NOTE: recorded anew for a later chunk, it is waited for a little longer.
                copied.record()
        finally:
            self._free.put((memory, copied))
        return copied


def _fill(path: Path, handle: int, offset: int, out: torch.Tensor) -> None:
    """`out` [bytes] uint8 on the host is written."""
    rest = memoryview(out.numpy())
    while rest:
        try:
            num_bytes = os.preadv(handle, [rest], offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if not num_bytes:
            raise CheckpointError(f"{path} has been cut short since its header was read")
        rest, offset = rest[num_bytes:], offset + num_bytes
