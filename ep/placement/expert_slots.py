"""The experts of one layer on one rank as plain memory, slot by slot.

What an expert is made of (matrices, scales, in whichever layout) does not matter to those who
carry it: a slot is the bytes of its parts, one after the other.
"""

from collections.abc import Sequence

import torch


class ExpertSlots:
    """Views of the weights themselves. Each tensor is [slots, ...]; a slot of it is dense in
    memory, in whichever order of dimensions; ValueError otherwise."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if len({tensor.shape[0] for tensor in tensors}) != 1:
            raise ValueError("tensors of one layer have equally many slots, and there is one")
        self._tensors = [_as_bytes(tensor) for tensor in tensors]
        self.num_slots = self._tensors[0].shape[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of an expert, all parts together."""
        return sum(tensor.shape[1] for tensor in self._tensors)

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    def parts(self, slot: int) -> tuple[torch.Tensor, ...]:
        """1-D uint8 views of a slot."""
        return tuple(tensor[slot] for tensor in self._tensors)

    def read(self, slot: int, row: torch.Tensor) -> None:
        """Copies a slot into `row` [slot_bytes] uint8."""
        for part, piece in zip(self.parts(slot), self.split(row), strict=True):
            piece.copy_(part)

    def write(self, slot: int, row: torch.Tensor) -> None:
        """Copies `row` [slot_bytes] uint8 into a slot, in order on the current stream."""
        for part, piece in zip(self.parts(slot), self.split(row), strict=True):
            part.copy_(piece)

    def split(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of `row` [slot_bytes or more] uint8, one for each part."""
        return tuple(row[: self.slot_bytes].split([tensor.shape[1] for tensor in self._tensors]))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, bytes] uint8 over the same memory."""
    if not _is_dense(tensor.shape[1:], tensor.stride()[1:]):
        raise ValueError(f"slots of {list(tensor.shape)}, strides {tensor.stride()}: not dense")
    shape = (tensor.shape[0], tensor[0].numel())
    return tensor.as_strided(shape, (tensor.stride(0), 1)).view(torch.uint8)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    extent = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True
