"""The masked layout of rows that are grouped by expert: a block of C rows for each, of which the
first are in use. `kernels.moe.permute_masked` fills it."""

from dataclasses import dataclass

import torch

from kernels.build.fp8_scales import empty_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRows:
    """Shapes as `kernels.moe.permute_masked` has them."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_of: torch.Tensor
    counts: torch.Tensor


def empty_masked(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    scale: torch.Tensor | None,
    *,
    quantises: bool = False,
) -> MaskedRows:
    """The outputs, nothing in them yet."""
    num_tokens, num_choices = topk_idx.shape
    dtype = torch.float8_e4m3fn if quantises else hidden.dtype
    rows = hidden.new_empty(num_experts, capacity, hidden.shape[1], dtype=dtype)
    integers = {"dtype": torch.int32, "device": hidden.device}
    return MaskedRows(
        rows=rows,
        scales=empty_scales(rows) if quantises or scale is not None else None,
        row_of=torch.empty(num_choices, num_tokens, **integers),
        counts=torch.empty(num_experts, **integers),
    )
