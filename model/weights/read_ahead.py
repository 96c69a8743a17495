"""Reads tensors before they are asked for, in the order in which they will be.

ahead = ReadAhead(start, num_bytes)
ahead.plan(names)
for name in names:
    ahead.take(name)      # begins with what comes next, then waits for this one
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch

from model.weights.file_reader import Reading

# What may be on its way, or read and not asked for yet, beside one more tensor.
WINDOW_BYTES = 512 << 20


class ReadAhead:
    """`start(name)` begins to read a tensor of `num_bytes(name)`. What was not planned, or is asked
    for out of turn, is read when it is asked for."""

    def __init__(
        self,
        start: Callable[[str], Reading],
        num_bytes: Callable[[str], int],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._start = start
        self._num_bytes = num_bytes
        self._window_bytes = window_bytes
        self._planned: OrderedDict[str, None] = OrderedDict()
        self._begun: dict[str, Reading] = {}
        self._begun_bytes = 0

    def plan(self, names: Iterable[str]) -> None:
        """In this order; each is to be taken once."""
        self._planned = OrderedDict.fromkeys(names)

    def take(self, name: str) -> torch.Tensor:
        """[num_bytes] uint8, waited for. CheckpointError when the file cannot be read."""
        if name not in self._begun:
            self._planned.pop(name, None)
            self._begin(name)
        while self._planned and self._begun_bytes < self._window_bytes:
            self._begin(self._planned.popitem(last=False)[0])
        data = self._begun.pop(name).result()
        self._begun_bytes -= self._num_bytes(name)
        return data

    def _begin(self, name: str) -> None:
        self._begun[name] = self._start(name)
        self._begun_bytes += self._num_bytes(name)
