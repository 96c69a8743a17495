"""One projection per attention head: the two products around absorbed attention.

    out[t, h, n] = sum over k of x[t, h, k] * weight[h, n, k]

    x       [T, heads, K]  float32 or bfloat16; may be a slice of longer vectors
    weight  [heads, N, K]  same dtype, any strides
    out     [T, heads, N]  same dtype; written to where it is given, which may be a slice too,
            else a view with heads outermost in memory

On a CPU the bits of a token do not depend on the other tokens, as in `kernels.linear`.
"""

import torch
import torch.nn.functional as F

from kernels.linear import MIN_ROWS


def head_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    num_rows = x.shape[0]
    if out is not None and not x.is_cpu:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
    if 0 < num_rows < MIN_ROWS and x.is_cpu:
        x = F.pad(x, (0, 0, 0, 0, 0, MIN_ROWS - num_rows))
    product = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:num_rows]
    return product if out is None else out.copy_(product)
