"""DeepGEMM as the path of `kernels.gemm.fp8_gemm` and `kernels.moe.fp8_grouped_gemm`.

It wants scales of activations with rows contiguous, as `quantise` leaves them; others it
transposes first.
"""

from importlib import import_module
from typing import Any

import torch

from core.cuda_home import set_cuda_home
from kernels.build.fp8_scales import Fp8Operands

# What computes; `kernels.ahead.deep_gemm_ahead` puts another in its place while it notes products.
set_cuda_home()
library: Any = import_module("deep_gemm")

# Its kernels are launched while what is before them ends, and wait for that themselves.
if hasattr(library, "set_pdl"):
    library.set_pdl(True)


def dense(operands: Fp8Operands) -> torch.Tensor:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    library.fp8_gemm_nt((x, x_scale), (weight, w_scale), out)
    return out


def masked(operands: Fp8Operands, counts: torch.Tensor, expected_rows: int) -> torch.Tensor:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    library.fp8_m_grouped_gemm_nt_masked(
        (x, x_scale), (weight, w_scale), out, counts, max(1, expected_rows)
    )
    return out


def contiguous(operands: Fp8Operands, ends: torch.Tensor) -> torch.Tensor:
    x, x_scale, weight, w_scale = operands
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    # By `ends` it goes from expert to expert; by the expert of each row it would load the operands
    # of blocks of padding, too.
    library.m_grouped_fp8_gemm_nt_contiguous(
        (x, x_scale), (weight, w_scale), out, ends, use_psum_layout=True
    )
    return out
