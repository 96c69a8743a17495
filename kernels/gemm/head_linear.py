"""One projection per attention head: the two products around absorbed attention.

    out[t, h, n] = sum over k of x[t, h, k] * weight[h, n, k]

    x       [T, heads, K]  float32 or bfloat16; may be a slice of longer vectors
    weight  [heads, N, K]  same dtype, any strides
    out     [T, heads, N]  same dtype; written to where it is given, which may be a slice too,
            else a view with heads outermost in memory

On a CPU the bits of a token do not depend on the other tokens, as in `kernels.gemm.linear`.
"""

import torch
import torch.nn.functional as F

from kernels.build.operands import FLOATS, check_operand
from kernels.gemm.linear import MIN_ROWS


def head_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[::2]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    check_operand("weight", weight, x.device, x.dtype)
    num_rows = x.shape[0]
    if out is not None:
        check_operand("out", out, x.device, x.dtype, shape=(*x.shape[:2], weight.shape[1]))
        if not x.is_cpu:
            torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
            return out
    if 0 < num_rows < MIN_ROWS and x.is_cpu:
        x = F.pad(x, (0, 0, 0, 0, 0, MIN_ROWS - num_rows))
    product = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:num_rows]
    return product if out is None else out.copy_(product)
