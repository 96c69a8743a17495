"""CUDA path of `mla_prefill`, for heads of DeepSeek-V3's sizes in bfloat16 on Hopper.

The library is compiled by nvcc and cached by `cuda_build`. In a pass of one prompt of 4,096
tokens and 128 heads it takes 0.7 of the Triton path's time.
"""

from pathlib import Path

import torch

from kernels.attention.mla_prefill_plan import KeyGroup
from kernels.build.cuda_kernel import FLOAT, LONG, NUMBER, POINTER, CudaKernel
from kernels.build.operands import check_contiguous

_OTHERWISE = "attention at prefill takes its slower path"
_KERNEL = CudaKernel(
    Path(__file__).with_name("mla_prefill.cu"),
    *(POINTER, LONG, LONG, POINTER, POINTER, LONG),
    *(POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG),
    *(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, FLOAT),
)
NOPE_DIM, ROPE_DIM, VALUE_DIM = 128, 64, 128
_ALIGNMENT = 8  # elements: the copy engine wants addresses and strides of 16 bytes
# Keys and values of heads whose tiles are drawn together, which are to stay in the L2 cache.
_SECTION_BYTES = 16 << 20


def takes(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> bool:
    """Whether there is a kernel for these arguments of `mla_prefill`, and nvcc for it."""
    return fits(query, cache, kv_b) and _KERNEL.is_built(_OTHERWISE)


def fits(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> bool:
    rank = kv_b.shape[2]
    sizes = query.shape[2], cache.shape[-1] - rank, kv_b.shape[1]
    strides = *query.stride()[:2], rank, cache.shape[-1]
    return (
        query.dtype == torch.bfloat16
        and sizes == (NOPE_DIM + ROPE_DIM, ROPE_DIM, NOPE_DIM + VALUE_DIM)
        and all(stride % _ALIGNMENT == 0 for stride in strides)
        and query.data_ptr() % 16 == 0
    )


def launch(
    query: torch.Tensor,  # [T, heads, D + R]
    both: torch.Tensor,  # [keys, heads, D + V], key without its rotated part, then value
    key_rope: torch.Tensor,  # [keys, R]
    group: KeyGroup,
    out: torch.Tensor,  # [T, heads, V], changed in place
    lse: torch.Tensor,  # [T, heads] float32, changed in place: natural logarithm of sums of exp
    *,
    scale: float,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """With `quantised`, of the shapes and strides that `quantise` gives for [T, heads * V],
    queries that have no key in a later group are written there, not to `out`.

    Raises RuntimeError where the kernel cannot be built or launched.
    """
    num_tokens, num_heads, _ = query.shape
    assert query.dtype == both.dtype == key_rope.dtype == out.dtype == torch.bfloat16
    assert query.shape[2] == NOPE_DIM + key_rope.shape[1] == NOPE_DIM + ROPE_DIM
    assert both.shape[2] == NOPE_DIM + out.shape[2] == NOPE_DIM + VALUE_DIM
    assert query.stride(2) == key_rope.stride(1) == 1
    check_contiguous(both=both, out=out, lse=lse)
    if not len(group.blocks):
        return
    key_bytes = both[0, 0].nbytes * len(both)
    section_heads = min(num_heads, max(1, _SECTION_BYTES // key_bytes))
    values, scales = quantised or (None, None)
    _KERNEL.launch(
        query.device, query, *query.stride()[:2], both, key_rope, key_rope.stride(0), group.blocks,
        group.drawn, out, lse, values, scales, 0 if scales is None else scales.stride(1),
        num_tokens, len(both), len(group.blocks), num_heads, section_heads, scale,
    )  # fmt: skip
