"""Triton path of `kernels.attention.absorb`: a program a head and block of tokens."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent
from kernels.build.fp8_scales import GROUP, LARGEST, SMALLEST, empty_scales
from kernels.elementwise.quantise_triton import quantise_group


class AbsorbShape(NamedTuple):
    """Tokens a program, summands a step of its pipeline."""

    tokens: int
    block_k: int
    num_warps: int
    num_stages: int


def shape_for(num_tokens: int) -> AbsorbShape:
    if num_tokens <= 32:
        return AbsorbShape(max(16, triton.next_power_of_2(num_tokens)), 128, 4, 3)
    if num_tokens <= 64:
        return AbsorbShape(64, 64, 4, 4)
    return AbsorbShape(128, 64, 8, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _absorb_values(
    latents, weight, out, scale, num_tokens, num_heads, weight_head_stride, scale_stride,
    latent_dim: tl.constexpr, group: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr,
    tokens: tl.constexpr, block_k: tl.constexpr, leads: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    if leads:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    token = tl.program_id(1) * tokens + tl.arange(0, tokens)
    is_token = token < num_tokens
    column, index = tl.arange(0, group), tl.arange(0, block_k)
    x_line = latents + (token.to(tl.int64) * num_heads + head)[:, None] * latent_dim
    w_line = weight + head.to(tl.int64) * weight_head_stride + column[None, :] * latent_dim
    total = tl.zeros([tokens, group], tl.float32)
    for first in range(0, latent_dim, block_k):
        x = tl.load(x_line + first + index[None, :], mask=is_token[:, None], other=0.0)
        w = tl.load(w_line + first + index[:, None])
        total = tl.dot(x, w, total)
    values, factor = quantise_group(total, largest, smallest)
    place = token.to(tl.int64)[:, None] * (num_heads * group) + head * group + column[None, :]
    tl.store(out + place, values, mask=is_token[:, None])
    tl.store(scale + head.to(tl.int64) * scale_stride + token, factor, mask=is_token)


def launch(
    latents: torch.Tensor, kv_b: torch.Tensor, nope_dim: int, *, follows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, latent_dim = latents.shape
    out = latents.new_empty(num_tokens, num_heads * GROUP, dtype=torch.float8_e4m3fn)
    scale = empty_scales(out)
    if not num_tokens:
        return out, scale
    weight = kv_b[:, nope_dim:]
    assert weight.shape[1] == GROUP
    assert latents.is_contiguous()
    assert weight.stride(2) == 1
    assert weight.stride(1) == latent_dim
    shape, is_dependent = shape_for(num_tokens), follows and dependent(latents)
    _absorb_values[num_heads, triton.cdiv(num_tokens, shape.tokens)](
        latents, weight, out, scale, num_tokens, num_heads, weight.stride(0), scale.stride(1),
        latent_dim=latent_dim, group=GROUP, largest=LARGEST, smallest=SMALLEST,
        tokens=shape.tokens, block_k=shape.block_k, leads=dependent(latents),
        dependent=is_dependent,
        num_warps=shape.num_warps, num_stages=shape.num_stages, launch_pdl=is_dependent,
    )  # fmt: skip
    return out, scale
