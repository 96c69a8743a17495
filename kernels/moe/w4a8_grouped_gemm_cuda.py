"""The CUDA kernel of `kernels.moe.w4a8_grouped_gemm`: built at first use, kept on disk."""

from pathlib import Path

import torch

from kernels.build.cuda_kernel import LONG, NUMBER, POINTER, CudaKernel

KERNEL = CudaKernel(
    Path(__file__).with_name("w4a8_grouped_gemm.cu"),
    NUMBER,
    *(POINTER, POINTER, LONG, LONG, LONG),
    *(POINTER, POINTER, POINTER, POINTER, LONG, LONG),
    *[NUMBER] * 7,
)
MAX_EXPERTS = 512
# Inputs of sums in float16: of 128, each at most 448 x 1/32 and scaled by at most 1/8, 292 times.
MAX_INPUTS = 292 * 128


def launch(
    activations: torch.Tensor,
    scales: torch.Tensor,
    scale_strides: tuple[int, int, int],
    blocks: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    capacity: int,
    expected_rows: int,
    out_scales: torch.Tensor | None = None,
    early: bool = False,
    leads: bool = False,
) -> None:
    """Enqueues the product on the current stream; the caller has checked every argument.

    activations    [..., K] float8_e4m3fn, contiguous
    scale_strides  of `scales` in elements, by expert, row and group of columns; the last is 0
                   where a row has one scale, or all rows one
    blocks         as `PackedWeights` holds them
    capacity       rows reserved for an expert; 0 where experts follow each other without gaps
    out_scales     of `out`, where what is gated leaves the kernel in FP8; [] one to quantise with
    early          as for `w4a8_grouped_gemm_masked`
    leads          as for `w4a8_grouped_gemm_gated`

    Raises RuntimeError where the kernel cannot be built or launched.
    """
    num_experts, tall, wide, _ = blocks.shape
    k = wide * 128
    out_scale_strides = (0, 0)
    if out_scales is not None and out_scales.dim():
        out_scale_strides = out_scales.stride(0), out_scales.stride(2)
    variant = _variant(expected_rows, tall, capacity or activations.numel() // k)
    KERNEL.launch(
        activations.device, variant, activations, scales, *scale_strides, blocks, counts, out,
        out_scales, *out_scale_strides, num_experts, capacity, activations.numel() // k,
        tall * 128, k, early, leads,
    )  # fmt: skip


def _variant(expected_rows: int, num_blocks: int, most_rows: int) -> int:
    """The tile for so many rows an expert, at most `most_rows`, and so many blocks of 128 outputs:
    0 is 256 outputs x up to 64 rows, 2 is 256 x up to 128, 1 is 128 x up to 128. 64 rows each take
    3 % less by 0 than by 2, but 64 on average, as chance has them, 6 to 13 % more."""
    if num_blocks % 2:
        return 1
    return 2 if expected_rows > 56 and most_rows > 64 else 0
