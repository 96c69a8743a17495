"""Gated MLP: the dense layers, and the shared experts of the others."""

from dataclasses import dataclass

import torch

from kernels.linear import linear
from kernels.silu_mul import silu_mul
from model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """gate_up [2 I, H], gate half first; down [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, weights: Weights, prefix: str) -> "Mlp":
        return cls(
            gate_up=weights.projection(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            down=weights.projection(f"{prefix}.down_proj.weight"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return linear(silu_mul(linear(x, self.gate_up)), self.down)
