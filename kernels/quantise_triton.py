"""Triton path of `kernels.quantise`: a program a row and block of groups."""

import torch
import triton
import triton.language as tl

from kernels.quantise import GROUP, LARGEST, SMALLEST, empty_scales

GROUPS = 8  # 1,024 values a program: two 16-byte loads for each of 128 threads
MASKED_PROGRAMS = 512  # of one expert and block of groups: they share its rows


@triton.jit
def quantise_group(values, largest: tl.constexpr, smallest: tl.constexpr):
    """(e4m3 values, scales) of float32 `values` [GROUPS, 128]."""
    peak = tl.maximum(tl.max(tl.abs(values), axis=1), smallest)
    # Correctly rounded divisions, so that the bits are those of the reference.
    out = values * tl.div_rn(largest, peak)[:, None]
    return out.to(tl.float8e4nv), tl.div_rn(peak, largest)


@triton.jit
def _quantise(
    x, out, scale, counts, num_rows, width, scale_expert_stride, scale_group_stride,
    largest: tl.constexpr, smallest: tl.constexpr, group: tl.constexpr, groups: tl.constexpr,
    masked: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    last = tl.load(counts + expert) if masked else num_rows
    index = tl.program_id(1) * groups + tl.arange(0, groups)
    columns = index[:, None] * group + tl.arange(0, group)[None, :]
    for row in range(tl.program_id(0), last, tl.num_programs(0)):
        start = (expert * num_rows + row) * width
        values = tl.load(x + start + columns, mask=columns < width, other=0.0).to(tl.float32)
        quantised, scales = quantise_group(values, largest, smallest)
        tl.store(out + start + columns, quantised, mask=columns < width)
        place = expert * scale_expert_stride + index * scale_group_stride + row
        tl.store(scale + place, scales, mask=index * group < width)


def launch(
    x: torch.Tensor, counts: torch.Tensor | None, *, squeeze: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [E, C, K], E = 1 to be squeezed away when there are no counts."""
    num_experts, num_rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = empty_scales(x)
    if x.numel():
        num_programs = num_rows if counts is None else min(num_rows, MASKED_PROGRAMS)
        grid = (num_programs, triton.cdiv(width, GROUPS * GROUP), num_experts)
        _quantise[grid](
            x, out, scale, counts, num_rows, width, scale.stride(0), scale.stride(2),
            largest=LARGEST, smallest=SMALLEST, group=GROUP, groups=GROUPS,
            masked=counts is not None, num_warps=4,
        )  # fmt: skip
    return (out[0], scale[0]) if squeeze else (out, scale)
