"""Brings the experts' results back to their tokens.

    out[t] = base[t] + sum over k of weights[t, k] * rows[row_of[k, t]]

in float32, choices in the order k = 0, 1, ...; those whose row_of is -1 are left out.

    rows     [M, H]  bfloat16 or float32
    row_of   [K, T]  int32 or int64; on a device the host does not read them, and those of no row
                     count as -1
    weights  [T, K]  float32
    base     [T, H]  dtype of rows, or None: the shared expert's result, the residual, or nothing
    out      [T, H]  dtype of rows

On a CPU the bits of a token do not depend on the other tokens. The Triton path agrees with the
reference within one bit of the last place.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from kernels.build.operands import FLOATS, INTEGERS, check_ids, check_operand
from kernels.build.paths import path_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What is still to be combined: shapes in this file's docstring. The norm after it (`rms_norm`)
    does that on its way. Raises ValueError as `combine`."""

    rows: torch.Tensor
    row_of: torch.Tensor
    weights: torch.Tensor
    base: torch.Tensor | None

    def __post_init__(self) -> None:
        _check(self.rows, self.row_of, self.weights, self.base)

    def combined(self) -> torch.Tensor:
        return combine(self.rows, self.row_of, self.weights, base=self.base)


# What a layer adds to the residual stream.
Update: TypeAlias = torch.Tensor | Combination


def combined(x: Update) -> torch.Tensor:
    return x.combined() if isinstance(x, Combination) else x


def combine(
    rows: torch.Tensor,
    row_of: torch.Tensor,
    weights: torch.Tensor,
    *,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit, and on a CPU for rows that
    there are not."""
    _check(rows, row_of, weights, base)
    if path_of("combine", rows.device) == "triton":
        from kernels.elementwise.combine_triton import launch

        return launch(rows, row_of, weights, base)
    return combine_reference(rows, row_of, weights, base=base)


def combine_reference(
    rows: torch.Tensor,
    row_of: torch.Tensor,
    weights: torch.Tensor,
    *,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    total = rows.new_zeros(row_of.shape[1], rows.shape[1], dtype=torch.float32)
    # Where there are no rows no token has one.
    for choice, numbers in enumerate(row_of if len(rows) else ()):
        here = numbers >= 0
        values = rows[numbers.clamp_min(0).long()].float() * weights[:, choice, None]
        total += torch.where(here[:, None], values, 0.0)
    return (total if base is None else total + base.float()).to(rows.dtype)


def _check(
    rows: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor, base: torch.Tensor | None
) -> None:
    if weights.dim() != 2 or weights.shape != row_of.shape[::-1] or rows.dim() != 2:
        shapes = [tuple(each.shape) for each in (rows, row_of, weights)]
        raise ValueError(f"rows, row_of and weights do not fit together: {shapes}")
    device = rows.device
    check_operand("rows", rows, device, *FLOATS)
    check_operand("row_of", row_of, device, *INTEGERS)
    check_operand("weights", weights, device, torch.float32)
    if base is not None:
        shape = (row_of.shape[1], rows.shape[1])
        check_operand("base", base, device, rows.dtype, shape=shape)
    check_ids("row_of", row_of, -1, len(rows))
