"""Tokens as they travel between ranks: a packed row each, of whole 32-bit words.

    words of hidden[t] in its own type, or, `quantises`, as FP8 with its scales (`kernels.quantise`)
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

from kernels.paths import path_of
from kernels.quantise import GROUP, quantise_reference

ROW_WORDS = 16


class PackedRow(NamedTuple):
    """Where the parts of a row begin, in words."""

    scales: int
    ids: int
    weights: int
    size: int

    @classmethod
    def of(cls, width: int, itemsize: int, num_choices: int, *, quantises: bool) -> "PackedRow":
        scales = width // 4 if quantises else -(-width * itemsize // 4)
        ids = scales + (width // GROUP if quantises else 0)
        weights = ids + num_choices
        size = -(-(weights + num_choices) // ROW_WORDS) * ROW_WORDS
        return cls(scales, ids, weights, size)


class Unpacked(NamedTuple):
    """hidden [N, H], scales [N, H / 128] float32 or None, topk_idx [N, K] int32, weights [N, K]
    float32: views."""

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
) -> torch.Tensor:
    """ValueError for arguments that do not fit."""
    if hidden.dim() != 2 or topk_idx.shape != weights.shape or len(hidden) != len(topk_idx):
        shapes = [tuple(each.shape) for each in (hidden, topk_idx, weights)]
        raise ValueError(f"hidden, topk_idx and weights do not fit together: {shapes}")
    if hidden.dtype not in (torch.bfloat16, torch.float32) or num_rows < len(hidden):
        raise ValueError(f"{len(hidden)} rows of {hidden.dtype} into {num_rows}")
    if quantises and hidden.shape[1] % GROUP:
        raise ValueError(f"H = {hidden.shape[1]} is not a multiple of {GROUP}")
    if path_of("pack_tokens", hidden.device) == "triton":
        from kernels.pack_tokens_triton import launch

        return launch(hidden, topk_idx, weights, num_rows, quantises=quantises)
    return pack_tokens_reference(hidden, topk_idx, weights, num_rows, quantises=quantises)


def pack_tokens_reference(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    num_rows: int,
    *,
    quantises: bool,
) -> torch.Tensor:
    num_tokens, width = hidden.shape
    num_choices = topk_idx.shape[1]
    row = PackedRow.of(width, hidden.element_size(), num_choices, quantises=quantises)
    out = torch.zeros(num_rows, row.size, dtype=torch.int32, device=hidden.device)
    dtype = torch.float8_e4m3fn if quantises else hidden.dtype
    parts = unpack(out, width, num_choices, dtype)
    parts.topk_idx[num_tokens:] = -1
    parts.topk_idx[:num_tokens] = topk_idx
    parts.weights[:num_tokens] = weights
    if parts.scales is not None:
        hidden, scales = quantise_reference(hidden)
        parts.scales[:num_tokens] = scales
    parts.hidden[:num_tokens] = hidden
    return out


def unpack(
    packed: torch.Tensor, width: int, num_choices: int, dtype: torch.dtype
) -> Unpacked:
    """Views of packed rows whose hidden states are `dtype`."""
    is_fp8 = dtype == torch.float8_e4m3fn
    row = PackedRow.of(width, dtype.itemsize, num_choices, quantises=is_fp8)
    floats = packed.view(torch.float32)
    return Unpacked(
        hidden=packed[:, : row.scales].view(dtype)[:, :width],
        scales=floats[:, row.scales : row.ids] if is_fp8 else None,
        topk_idx=packed[:, row.ids : row.weights],
        weights=floats[:, row.weights : row.weights + num_choices],
    )
