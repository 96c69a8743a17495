"""Tokens as they travel between ranks: a packed row each, of whole 32-bit words.

    words of hidden[t] in its own type, or, `quantises`, as FP8 with its scales (`quantise`,
    `scale` as there; the one scale of all rows does not travel)
    K words of expert ids, int32
    K words of weights, float32
    words without meaning, up to a multiple of ROW_WORDS: rows stay aligned in memory

    hidden    [T, H]     bfloat16 or float32; H even, and a multiple of 128 where it is quantised
    topk_idx  [T, K]     int64 or int32
    weights   [T, K]     float32
    out       [N, W]     int32, N at least T: rows from T on are of no token, with ids of -1

Exact. `unpack` gives views of packed rows.
"""

from typing import NamedTuple

import torch

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, INTEGERS, check_ids, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.quantise import check_scale, quantise_reference
from kernels.moe.packed_row import PackedRow


class Unpacked(NamedTuple):
    """hidden [N, H], scales [N, S] float32 or None, topk_idx [N, K] int32, weights [N, K] float32:
    views."""

    hidden: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    weights: torch.Tensor


def pack_tokens(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    num_rows: int,
    *,
    quantises: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """ValueError for arguments that do not fit."""
    fits = hidden.dim() == topk_idx.dim() == 2 and len(hidden) == len(topk_idx)
    if not fits or topk_idx.shape != weights.shape:
        shapes = [tuple(each.shape) for each in (hidden, topk_idx, weights)]
        raise ValueError(f"hidden, topk_idx and weights do not fit together: {shapes}")
    if hidden.dtype not in FLOATS or num_rows < len(hidden):
        raise ValueError(f"{len(hidden)} rows of {hidden.dtype} into {num_rows}")
    if quantises and hidden.shape[1] % GROUP:
        raise ValueError(f"H = {hidden.shape[1]} is not a multiple of {GROUP}")
    check_operand("topk_idx", topk_idx, hidden.device, *INTEGERS)
    check_operand("weights", weights, hidden.device, torch.float32)
    check_scale(hidden, scale)
    check_ids("topk_idx", topk_idx, -1, 2**31)  # int32 is what travels
    if path_of("pack_tokens", hidden.device) == "triton":
        from kernels.moe.pack_tokens_triton import launch

        return launch(hidden, topk_idx, weights, num_rows, quantises=quantises, scale=scale)
    return pack_tokens_reference(
        hidden, topk_idx, weights, num_rows, quantises=quantises, scale=scale
    )


def pack_tokens_reference(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    num_rows: int,
    *,
    quantises: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, width = hidden.shape
    num_choices = topk_idx.shape[1]
    scales = None
    if quantises:
        hidden, scales = quantise_reference(hidden, scale=scale)
    num_scales = 0 if scales is None or scale is not None else scales.shape[1]
    row = PackedRow.of(width, hidden.element_size(), num_choices, num_scales)
    out = torch.zeros(num_rows, row.size, dtype=torch.int32, device=hidden.device)
    parts = unpack(out, width, num_choices, hidden.dtype, num_scales)
    parts.topk_idx[num_tokens:] = -1
    parts.topk_idx[:num_tokens] = topk_idx
    parts.weights[:num_tokens] = weights
    if parts.scales is not None and scales is not None:
        parts.scales[:num_tokens] = scales
    parts.hidden[:num_tokens] = hidden
    return out


def unpack(
    packed: torch.Tensor,
    width: int,
    num_choices: int,
    dtype: torch.dtype,
    num_scales: int = 0,
) -> Unpacked:
    """Views of packed rows whose hidden states are `dtype`, with so many scales a row."""
    row = PackedRow.of(width, dtype.itemsize, num_choices, num_scales)
    floats = packed.view(torch.float32)
    return Unpacked(
        hidden=packed[:, : row.scales].view(dtype)[:, :width],
        scales=floats[:, row.scales : row.ids] if num_scales else None,
        topk_idx=packed[:, row.ids : row.weights],
        weights=floats[:, row.weights : row.weights + num_choices],
    )
