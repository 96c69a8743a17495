"""Gated MLP: the dense layers, and the shared experts of the others."""

from dataclasses import dataclass

import torch

from kernels.elementwise.silu_mul import silu_mul, silu_mul_quantise
from model.projection import Activations, Projection
from model.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """gate_up [2 I, H], gate half first; down [H, I]."""

    gate_up: Projection
    down: Projection

    @classmethod
    def load(cls, weights: Weights, prefix: str) -> "Mlp":
        return cls(
            gate_up=weights.projection(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            down=weights.projection(f"{prefix}.down_proj.weight"),
        )

    def forward(self, x: Activations) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        both = self.gate_up.forward(x)
        return self.down.forward(silu_mul_quantise(both) if self.down.is_fp8 else silu_mul(both))
