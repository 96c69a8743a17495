"""Reads a model's weights in the type and to the device that it computes with."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.gemm.block_dequantise import BLOCK
from kernels.gemm.linear import favoured_layout
from model.batch import AttentionForm
from model.projection import Projection
from model.weights.checkpoint import Checkpoint

LinearForm = Literal["auto", "plain", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and what to make of its tensors.

    linear  what to make of projections that are stored in FP8: "fp8" leaves them so (on a CPU
            computed by references), "plain" makes them `dtype`, "auto" leaves them on a GPU that
            computes in bfloat16. Others are always `dtype`.
    form    of attention: the plain one expands latents by kv_b as it is stored in FP8, too
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    linear: LinearForm = "auto"
    form: AttentionForm = AttentionForm.PLAIN

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.read(name, dtype or self.dtype).to(self.device)

    def projection(
        self, *names: str, bias: torch.Tensor | None = None, plain: bool = False
    ) -> Projection:
        """Several names: matrices [., K] below each other, one projection in place of several of
        the same input. `plain`: whatever `linear` says."""
        if not plain and self.keeps_fp8 and self.fits_fp8(names):
            stored = [self.checkpoint.read_fp8(name) for name in names]
            return Projection(
                weight=torch.cat([weight for weight, _ in stored]).to(self.device).contiguous(),
                scale=torch.cat([scale for _, scale in stored]).to(self.device).contiguous(),
                bias=bias,
                dtype=self.dtype,
            )
        weight = favoured_layout(torch.cat([self.get(name) for name in names]))
        return Projection(weight=weight, bias=bias, dtype=self.dtype)

    @property
    def keeps_fp8(self) -> bool:
        if self.linear == "auto":
            return bool(self.device.type == "cuda" and self.dtype == torch.bfloat16)
        return self.linear == "fp8"

    def fits_fp8(self, names: tuple[str, ...]) -> bool:
        """Whether all are FP8, whole blocks wide, and blocks stay blocks when they are below each
        other: all but the last must be whole blocks high."""
        if not all(self.checkpoint.is_fp8(name) for name in names):
            return False
        shapes = [self.checkpoint.stored[name].shape for name in names]
        return shapes[0][1] % BLOCK == 0 and all(rows % BLOCK == 0 for rows, _ in shapes[:-1])

    def expands_fp8(self, kv_b: str) -> bool:
        """Whether the matrix of this name is kept in FP8 beside its `dtype`."""
        return self.form is AttentionForm.PLAIN and self.keeps_fp8 and self.fits_fp8((kv_b,))

    def has(self, name: str) -> bool:
        return name in self.checkpoint.stored
