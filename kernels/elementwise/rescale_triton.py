"""Triton path of `kernels.elementwise.rescale`: programs share the rows of an expert."""

import torch
import triton
import triton.language as tl

from kernels.build.fp8_scales import GROUP, LARGEST
from kernels.elementwise.quantise_triton import GROUPS, row_programs


@triton.jit(do_not_specialize=["capacity", "expert_stride", "group_stride"])
def _rescale(
    x, scale, tensor_scale, counts, out, capacity, width, expert_stride, row_stride, group_stride,
    largest: tl.constexpr, group: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    last = tl.load(counts + expert)
    whole = tl.load(tensor_scale)
    index = tl.program_id(1) * groups + tl.arange(0, groups)
    columns = index[:, None] * group + tl.arange(0, group)[None, :]
    inside = columns < width
    for row in range(tl.program_id(0), last, tl.num_programs(0)):
        place = (expert * capacity + row) * width + columns
        line = scale + expert * expert_stride + row * row_stride
        factor = tl.load(line + index * group_stride, mask=index * group < width, other=0.0)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.div_rn(factor, whole)[:, None]
        values = tl.minimum(tl.maximum(values, -largest), largest)
        tl.store(out + place, values.to(tl.float8e4nv), mask=inside)


def launch(
    x: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor,
    counts: torch.Tensor,
    expected_rows: int = 0,
) -> torch.Tensor:
    num_experts, capacity, width = x.shape
    out = torch.empty_like(x)
    if x.numel():
        num_programs = row_programs(capacity, expected_rows)
        grid = (num_programs, triton.cdiv(width, GROUPS * GROUP), num_experts)
        _rescale[grid](
            x, scale, tensor_scale, counts, out, capacity, width, *scale.stride(),
            largest=LARGEST, group=GROUP, groups=GROUPS, num_warps=4,
        )  # fmt: skip
    return out
