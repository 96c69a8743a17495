"""Triton path of `kernels.attention.merge_states`: a program a block of (token, head) pairs."""

import torch
import triton
import triton.language as tl

ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _merge_states(
    a, lse_a, b, lse_b, out, lse, num_rows, width, rows: tl.constexpr, padded: tl.constexpr
):
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    column = tl.arange(0, padded)
    here = row < num_rows
    inside = here[:, None] & (column < width)[None, :]
    log_a = tl.load(lse_a + row, mask=here, other=float("-inf"))
    log_b = tl.load(lse_b + row, mask=here, other=float("-inf"))
    peak = tl.maximum(log_a, log_b)
    # Without any key the difference would be inf - inf.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    part_a, part_b = tl.exp(log_a - shift), tl.exp(log_b - shift)
    total = part_a + part_b
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    inverse = tl.where(is_empty, 0.0, 1.0 / total)
    place = row[:, None] * width + column[None, :]
    first = tl.load(a + place, mask=inside, other=0.0)
    second = tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    merged = first.to(tl.float32) * (part_a * inverse)[:, None]
    merged += second * (part_b * inverse)[:, None]
    tl.store(out + place, merged.to(first.dtype), mask=inside)
    joined = tl.where(is_empty, float("-inf"), shift + tl.log(total))
    tl.store(lse + row, joined, mask=here)


def launch(
    a: torch.Tensor,
    lse_a: torch.Tensor,
    b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    rows: int = ROWS,
    num_warps: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    a, lse_a, b, lse_b = (each.contiguous() for each in (a, lse_a, b, lse_b))
    num_rows, width = lse_a.numel(), a.shape[-1]
    out, lse = torch.empty_like(a), torch.empty_like(lse_a)
    if num_rows:
        _merge_states[(triton.cdiv(num_rows, rows),)](
            a, lse_a, b, lse_b, out, lse, num_rows, width,
            rows=rows, padded=triton.next_power_of_2(width), num_warps=num_warps,
        )  # fmt: skip
    return out, lse
