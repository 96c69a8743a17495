"""Carries experts between ranks by torch.distributed: NCCL between GPUs, gloo on the CPU.

It has a process group of its own and, on a GPU, uses the stream of the thread that stages, so that
the group's steps go on meanwhile. Every rank goes through the same rounds in the same order.
Nothing ends a wait within NCCL but the end of the process, so a round begins when all ranks have
met at it: one that fails before leaves none waiting there.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from core.errors import TransferError
from ep.migration.migration_sockets import SocketCarrier

Span = tuple[int, torch.Tensor]  # the other rank, 1-D uint8 on the group's device


class DeviceCarrier:
    """One migration's; one thread uses it. `group` is a process group of its own;
    `meeting` connects the same ranks."""

    def __init__(
        self, group: dist.ProcessGroup, meeting: SocketCarrier, *, bytes_per_second: float
    ) -> None:
        self._group = group
        self._meeting = meeting
        self._seconds_per_byte = 1 / bytes_per_second

    def carry(self, sends: Sequence[Span], receives: Sequence[Span]) -> None:
        """As `SocketCarrier.carry`; slowed down after the round, not within."""
        self._meeting.meet()
        operations = [
            dist.P2POp(operation, tensor, peer, self._group)
            for operation, spans in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in spans
        ]
        if not operations:
            return
        began = time.monotonic()
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if operations[0].tensor.is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise TransferError(f"experts cannot be moved: {error}") from error
        due = began + sum(tensor.numel() for _, tensor in sends) * self._seconds_per_byte
        time.sleep(max(0.0, due - time.monotonic()))

    def close(self) -> None:
        """The process group stays for the next migration."""
        self._meeting.close()
