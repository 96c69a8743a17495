"""Reads a model's weights in the type and to the device that it computes with."""

from dataclasses import dataclass

import torch

from kernels.linear import favoured_layout
from model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and what to make of its tensors."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.read(name, dtype or self.dtype).to(self.device)

    def projection(self, *names: str) -> torch.Tensor:
        """[N, K], laid out for `kernels.linear`. Several names: matrices below each other, one
        projection in place of several of the same input."""
        return favoured_layout(torch.cat([self.get(name) for name in names]))

    def has(self, name: str) -> bool:
        return name in self.checkpoint.stored
