"""Triton path of `kernels.moe.pack_tokens`: a program a row and block of columns."""

import torch
import triton
import triton.language as tl

from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST
from kernels.elementwise.quantise_triton import GROUPS, quantise_by, quantise_group
from kernels.moe.packed_row import PackedRow


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_tokens(
    hidden, topk_idx, weights, scale, out, out_values, out_floats, num_tokens, width, size,
    values_stride, hidden_stride, idx_stride, weights_stride, scales_at, ids_at, weights_at,
    num_choices: tl.constexpr, padded_choices: tl.constexpr, groups: tl.constexpr,
    group_size: tl.constexpr, quantises: tl.constexpr, given: tl.constexpr,
    largest: tl.constexpr, smallest: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    is_token = token < num_tokens
    if tl.program_id(1) == 0:
        choice = tl.arange(0, padded_choices)
        is_choice = choice < num_choices
        is_known = choice < tl.where(is_token, num_choices, 0)
        ids = tl.load(topk_idx + token * idx_stride + choice, mask=is_known, other=-1)
        tl.store(out + token * size + ids_at + choice, ids.to(tl.int32), mask=is_choice)
        factors = tl.load(weights + token * weights_stride + choice, mask=is_known, other=0.0)
        tl.store(out_floats + token * size + weights_at + choice, factors, mask=is_choice)
    if not is_token:
        return
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    column = group[:, None] * group_size + tl.arange(0, group_size)[None, :]
    values = tl.load(hidden + token * hidden_stride + column, mask=column < width, other=0.0)
    if given:
        values = quantise_by(values.to(tl.float32), tl.load(scale), largest)
    elif quantises:
        values, scales = quantise_group(values.to(tl.float32), largest, smallest)
        goal = out_floats + token * size + scales_at + group
        tl.store(goal, scales, mask=group * group_size < width)
    tl.store(out_values + token * values_stride + column, values, mask=column < width)


def launch(
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
    given = quantises and scale is not None
    dtype = torch.float8_e4m3fn if quantises else hidden.dtype
    num_scales = width // GROUP if quantises and not given else 0
    row = PackedRow.of(width, dtype.itemsize, num_choices, num_scales)
    out = torch.empty(num_rows, row.size, dtype=torch.int32, device=hidden.device)
    if not num_rows:
        return out
    hidden, topk_idx, weights = (
        each if each.stride(1) == 1 else each.contiguous() for each in (hidden, topk_idx, weights)
    )
    values = out.view(dtype)
    _pack_tokens[num_rows, triton.cdiv(width, GROUPS * GROUP)](
        hidden, topk_idx, weights, scale, out, values, out.view(torch.float32), num_tokens, width,
        row.size, values.stride(0), hidden.stride(0), topk_idx.stride(0), weights.stride(0),
        row.scales, row.ids, row.weights, num_choices=num_choices,
        padded_choices=triton.next_power_of_2(num_choices), groups=GROUPS, group_size=GROUP,
        quantises=quantises, given=given, largest=LARGEST, smallest=SMALLEST,
    )  # fmt: skip
    return out
