"""One projection per expert, over rows that are grouped by expert (contiguous layout).

out[i] = weight[expert of row i] @ x[i]

x       [N, K]     rows of expert 0 first, then those of expert 1, ...
counts  rows of each expert, sums to N; experts beyond E have none
weight  [E, M, K]  as in checkpoints
out     [N, M]     dtype of x
"""

from collections.abc import Sequence

import torch


def grouped_linear(x: torch.Tensor, counts: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    stop = 0
    for expert, count in enumerate(counts):
        if count:
            start, stop = stop, stop + count
            torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
    assert stop == x.shape[0], (stop, x.shape[0])
    return out
