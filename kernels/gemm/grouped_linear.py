"""One projection per expert, over rows that are grouped by expert.

    out[i] = weight[expert of row i] @ x[i]

    x       [N, K], or masked [E, C, K]
    weight  [E, M, K]  any strides, fastest as `kernels.gemm.linear.favoured_layout` leaves them
    out     [N, M], or masked [E, C, M]; dtype of x

Three layouts of the rows:

    contiguous  rows of expert 0 first, then those of expert 1, ...; `counts` on the host sum to N;
                slots beyond E, if any, are empty
    aligned     as `permute` leaves them with ALIGNMENT: expert_of [N] int32, -1: padding
    masked      expert e has x[e, : counts[e]], counts [E] int32 on the device

What padding holds does not matter, and what is written there means nothing. The latter two never
wait for the host on a GPU, where Triton is within TOLERANCE of the reference, relative by norm. On
a CPU the bits of a row do not depend on the other rows, as in `linear`: an expert of less than
MIN_ROWS rows is given some of the next ones as well, which are then overwritten.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.build.aligned_rows import ALIGNMENT
from kernels.build.operands import FLOATS, check_contiguous, check_ids, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import check_counts
from kernels.gemm.linear import MIN_ROWS, linear

TOLERANCE = 1e-2  # of bfloat16; float32: 1e-5


def grouped_linear(x: torch.Tensor, counts: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    """Contiguous layout. ValueError for arguments that do not fit."""
    _check(x, weight)
    num_rows, here = x.shape[0], counts[: len(weight)]
    if x.dim() != 2 or sum(here) != num_rows or any(count < 0 for count in here):
        raise ValueError(f"counts {list(here)} are not of x {tuple(x.shape)}")
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


def grouped_linear_masked(
    x: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor, *, expected_rows: int = 0
) -> torch.Tensor:
    """`expected_rows` of an expert, 0: about C; any number is right. ValueError for arguments that
    do not fit."""
    _check(x, weight)
    check_contiguous(x=x)
    if x.dim() != 3 or x.shape[0] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} does not fit experts {tuple(weight.shape)}")
    check_counts(x, counts)
    if path_of("grouped_linear", x.device) == "triton" and weight.is_contiguous():
        from kernels.gemm.grouped_linear_triton import masked

        return masked(x, counts, weight, expected_rows or x.shape[1])
    return grouped_linear_masked_reference(x, counts, weight)


def grouped_linear_aligned(
    x: torch.Tensor, expert_of: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """ValueError for arguments that do not fit, and on a CPU for experts that there are not. On a
    device the host does not read `expert_of`, and other experts count as -1."""
    _check(x, weight)
    check_contiguous(x=x, expert_of=expert_of)
    if x.dim() != 2 or x.shape[0] % ALIGNMENT:
        raise ValueError(f"x must be [N, K] with N a multiple of 128, is {tuple(x.shape)}")
    check_operand("expert_of", expert_of, x.device, torch.int32, shape=x.shape[:1])
    check_ids("expert_of", expert_of, -1, len(weight))
    if path_of("grouped_linear", x.device) == "triton" and weight.is_contiguous():
        from kernels.gemm.grouped_linear_triton import aligned

        return aligned(x, expert_of, weight)
    return grouped_linear_aligned_reference(x, expert_of, weight)


def grouped_linear_masked_reference(
    x: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    for expert, count in enumerate(counts.tolist()):
        if count:
            out[expert, :count] = linear(x[expert, :count], weight[expert])
    return out


def grouped_linear_aligned_reference(
    x: torch.Tensor, expert_of: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, matrix in enumerate(weight):
        here = (expert_of == expert).nonzero().squeeze(1)
        if len(here):
            out[here] = linear(x[here], matrix)
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dim() != 3 or x.shape[-1] != weight.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    check_operand("x", x, weight.device, *FLOATS)
    check_operand("weight", weight, weight.device, x.dtype)
