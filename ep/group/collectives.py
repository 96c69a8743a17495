"""The two collective operations that dispatch and combine are made of."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from core.errors import Unavailable
from ep.group.mesh import SocketMesh

# One operation under two names: torch 2.13 deprecates the one that 2.11 has.
_all_gather = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


class Collectives(Protocol):
    """Called in the same order on all ranks; tensors are contiguous, equal in dtype and row
    shape on all ranks, on the group's device. Unavailable when a peer is lost."""

    def all_gather(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """`own` [N, ...] of every rank into `out` [ranks * N, ...], in rank order. `meanwhile` is
        called once, to compute what does not need `out` while it travels."""

    def all_to_all(
        self,
        out: torch.Tensor,
        out_rows: Sequence[int],
        own: torch.Tensor,
        own_rows: Sequence[int],
    ) -> None:
        """The r-th group of `own_rows[r]` rows of `own` goes to rank r; `out_rows[r]` rows come
        from it. Both tensors hold their groups in rank order."""


class MeshCollectives:
    """CPU tensors over the sockets that the group has anyway."""

    def __init__(self, mesh: SocketMesh, rank: int, size: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._size = size

    def all_gather(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        num_rows = own.shape[0]
        out[self._rank * num_rows : (self._rank + 1) * num_rows] = own
        groups = _groups(out, [num_rows] * self._size)
        self._mesh.swap([_bytes(own)] * self._size, groups, meanwhile)

    def all_to_all(
        self,
        out: torch.Tensor,
        out_rows: Sequence[int],
        own: torch.Tensor,
        own_rows: Sequence[int],
    ) -> None:
        outgoing, incoming = _groups(own, own_rows), _groups(out, out_rows)
        incoming[self._rank][:] = outgoing[self._rank]
        self._mesh.swap(outgoing, incoming)


class TorchCollectives:
    """NCCL for CUDA tensors (or gloo for CPU ones), on the default process group."""

    def all_gather(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """On a GPU the two run side by side, on streams of their own."""
        try:
            work = _all_gather(out, own, async_op=True)
        except RuntimeError as error:
            raise Unavailable(f"EP all-gather failed: {error}") from error
        if meanwhile is not None:
            meanwhile()
        try:
            work.wait()
        except RuntimeError as error:
            raise Unavailable(f"EP all-gather failed: {error}") from error

    def all_to_all(
        self,
        out: torch.Tensor,
        out_rows: Sequence[int],
        own: torch.Tensor,
        own_rows: Sequence[int],
    ) -> None:
        try:
            dist.all_to_all_single(out, own, list(out_rows), list(own_rows))
        except RuntimeError as error:
            raise Unavailable(f"EP all-to-all failed: {error}") from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as bytes."""
    if not tensor.numel():
        return memoryview(bytearray())  # writable, unlike b""
    if tensor.dtype == torch.bfloat16:  # which numpy does not know
        tensor = tensor.view(torch.int16)
    return memoryview(tensor.numpy()).cast("B")


def _groups(tensor: torch.Tensor, num_rows: Sequence[int]) -> list[memoryview]:
    """The memory of consecutive groups of rows."""
    everything = _bytes(tensor)
    row_bytes = len(everything) // tensor.shape[0] if tensor.shape[0] else 0
    groups, start = [], 0
    for count in num_rows:
        groups.append(everything[start : start + count * row_bytes])
        start += count * row_bytes
    return groups
