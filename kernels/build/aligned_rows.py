"""The aligned layout of rows that are grouped by expert: each expert's begin at a multiple of an
alignment. `kernels.moe.permute` fills it."""

from dataclasses import dataclass

import torch

from kernels.build.fp8_scales import empty_scales

ALIGNMENT = 128  # which DeepGEMM's contiguous products want


@dataclass(frozen=True, slots=True, kw_only=True)
class Permuted:
    """Shapes as `kernels.moe.permute` has them."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_of: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    expert_of: torch.Tensor


def empty_permuted(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    alignment: int,
    scale: torch.Tensor | None,
    most: int | None = None,
) -> Permuted:
    """The outputs, nothing in them yet."""
    num_tokens, num_choices = topk_idx.shape
    most = topk_idx.numel() if most is None else most
    num_rows = -(-(most + min(num_experts, most) * (alignment - 1)) // alignment) * alignment
    rows = hidden.new_empty(num_rows, hidden.shape[1])
    integers = {"dtype": torch.int32, "device": hidden.device}
    return Permuted(
        rows=rows,
        scales=None if scale is None else empty_scales(rows),
        row_of=torch.empty(num_choices, num_tokens, **integers),
        counts=torch.empty(num_experts, **integers),
        ends=torch.empty(num_experts, **integers),
        expert_of=torch.empty(num_rows, **integers),
    )
