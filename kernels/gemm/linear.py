"""Dense projection.

    out[t, n] = sum over k of x[t, k] * weight[n, k]  (+ bias[n])

    x       [T, K]  float32 or bfloat16
    weight  [N, K]  same dtype; any strides, fastest as `favoured_layout` leaves them
    bias    [N]     or None
    out     [T, N]  same dtype, accumulated in float32

On a CPU the bits of a row do not depend on the other rows (with MKL, as measured; for Intel's
processors see `kernels.build.mkl_rows`): products of fewer than MIN_ROWS rows would sum in another
order, so short inputs are padded. With the favoured layout that costs next to nothing.
"""

import torch
import torch.nn.functional as F

from kernels.build.mkl_rows import ask_for_rows_by_themselves
from kernels.build.operands import FLOATS, check_operand

MIN_ROWS = 4
# Here, since it must come before the first product of a process, whoever begins it.
ask_for_rows_by_themselves()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    check_operand("weight", weight, x.device, x.dtype)
    if bias is not None:
        check_operand("bias", bias, x.device, x.dtype, shape=weight.shape[:1])
    num_rows = x.shape[0]
    if 0 < num_rows < MIN_ROWS and x.is_cpu:
        padded = F.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
        return F.linear(padded, weight, bias)[:num_rows]
    return F.linear(x, weight, bias)


def favoured_layout(weight: torch.Tensor) -> torch.Tensor:
    """The same [..., N, K] matrices, stored as products of few rows read them fastest: on a CPU
    with each matrix's columns contiguous, elsewhere as they are."""
    if not weight.is_cpu:
        return weight
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)
