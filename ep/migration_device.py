"""Carries experts between GPUs by NCCL, on a stream and a communicator of its own.

The group's steps go on meanwhile on the main stream. Every rank goes through the same rounds in
the same order, and waits for each on the host only, in the thread that stages.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from core.errors import TransferError

Span = tuple[int, torch.Tensor]  # the other rank, 1-D uint8 on the GPU


class DeviceCarrier:
    """One thread uses it; `group` is a process group that nobody else uses."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, bytes_per_second: float
    ) -> None:
        self._group = group
        self._stream = torch.cuda.Stream(device)
        self._seconds_per_byte = 1 / bytes_per_second

    def carry(self, sends: Sequence[Span], receives: Sequence[Span]) -> None:
        """As `SocketCarrier.carry`."""
        began = time.monotonic()
        operations = [
            dist.P2POp(operation, tensor, peer, self._group)
            for operation, spans in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in spans
        ]
        if not operations:
            return
        try:
            with torch.cuda.stream(self._stream):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            self._stream.synchronize()
        except RuntimeError as error:
            raise TransferError(f"experts cannot be moved: {error}") from error
        due = began + sum(tensor.numel() for _, tensor in sends) * self._seconds_per_byte
        time.sleep(max(0.0, due - time.monotonic()))

    def close(self) -> None:
        """The communicator stays for the next migration."""
