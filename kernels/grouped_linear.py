"""One projection per expert, over rows that are grouped by expert (contiguous layout).

    out[i] = weight[expert of row i] @ x[i]

    x       [N, K]     rows of expert 0 first, then those of expert 1, ...
    counts  rows of each expert, sums to N; slots beyond E, if any, are empty
    weight  [E, M, K]  any strides, fastest as `kernels.linear.favoured_layout` leaves them
    out     [N, M]     dtype of x

On a CPU the bits of a row do not depend on the other rows, as in `kernels.linear`. An expert with
fewer than MIN_ROWS rows is given some of the rows behind it as well; what it makes of them is
overwritten by the experts that they belong to.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.linear import MIN_ROWS


def grouped_linear(x: torch.Tensor, counts: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    num_rows = x.shape[0]
    assert sum(counts[: weight.shape[0]]) == num_rows, (counts, num_rows)
    least = MIN_ROWS if x.is_cpu else 1
    x = F.pad(x, (0, 0, 0, least - 1))
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for matrix, count in zip(weight.transpose(1, 2).unbind(0), counts, strict=False):
        if count:
            stop = start + max(count, least)
            torch.mm(x[start:stop], matrix, out=out[start:stop])
            start += count
    return out[:num_rows]
