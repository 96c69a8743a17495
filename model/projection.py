"""A learned matrix and how activations go through it: in the type that the model computes with, or
in FP8."""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from kernels.elementwise.combine import Update
from kernels.elementwise.quantise import quantise
from kernels.elementwise.rms_norm import rms_norms
from kernels.gemm.fp8_gemm import fp8_gemm
from kernels.gemm.linear import linear

# As `quantise` gives them: values [T, K] float8_e4m3fn, scales [T, K / 128] float32.
Quantised: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Activations: TypeAlias = torch.Tensor | Quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """out[t] = x[t] @ weight^T + bias, in `dtype`.

    weight  [N, K] `dtype`, laid out for `kernels.gemm.linear`; or float8_e4m3fn, contiguous
    scale   None; or [ceil(N / 128), K / 128] float32, what 128 x 128 FP8 values are multiplied by
    bias    [N] `dtype` or None

    In FP8 the activations are quantised too, one scale for 128 of a token's values. The error of
    that, relative by norm, is that of e4m3: below 4% in either factor.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.scale is not None

    def forward(self, x: Activations) -> torch.Tensor:
        """[T, K] -> [T, N]. Quantised activations are for FP8 weights only."""
        if self.scale is None:
            assert isinstance(x, torch.Tensor)
            return linear(x, self.weight, self.bias)
        values, scales = quantise(x) if isinstance(x, torch.Tensor) else x
        out = fp8_gemm(values, scales, self.weight, self.scale).to(self.dtype)
        return out if self.bias is None else out + self.bias

    def forward_wide(self, x: Activations, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N] float32, into `out` where there is one. On a GPU products of 2-byte
        types are not rounded to them on the way."""
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        if isinstance(x, torch.Tensor) and x.is_cuda and is_half and not self.is_fp8:
            if out is None:
                out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
            torch.mm(x, self.weight.t(), torch.float32, out=out)
            return out if self.bias is None else out.add_(self.bias)
        product = self.forward(x).float()
        return product if out is None else out.copy_(product)

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        """RMSNorm of x [T, K] as `forward` takes it best."""
        return self._normed(x, None, weight, eps)[0]

    def add_normed(
        self, x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[Activations, torch.Tensor]:
        """(RMSNorm of x + residual as `forward` takes it best, x + residual)."""
        return self._normed(x, residual, weight, eps)

    def _normed(
        self, x: Update, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[Activations, torch.Tensor]:
        form = {"plain": not self.is_fp8, "quantises": self.is_fp8}
        out, values, scales, _, total = rms_norms(x, residual, weight, eps, **form)
        return (values, scales) if self.is_fp8 else out, total
