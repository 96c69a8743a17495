"""One FP8 projection per expert.

    out[i, n] = sum over k of x[i, k] * x_scale[i, k / 128] * w[e][n, k] * w_scale[e][n/128, k/128]

with e the expert of row i, summed in float32.

    x          [E, C, K] (masked) or [M, K] (contiguous)  float8_e4m3fn, contiguous
    x_scale    [E, C, K / 128] or [M, K / 128] float32; fastest with rows contiguous
    weight     [E, N, K]  float8_e4m3fn, contiguous;  w_scale [E, N / 128, K / 128] float32
    counts     [E] int32, masked: rows of each expert; further ones are neither read nor written
    expert_of  [M] int32, contiguous, and
    ends       [E] int32, where each expert's rows end: as `permute` leaves them with ALIGNMENT; on
               a device the host reads neither. Results of padding mean nothing
    out        [E, C, N] or [M, N]  bfloat16

K is a multiple of 128. DeepGEMM or Triton, whichever was measured to be faster for the shape;
Triton where DeepGEMM is not installed or (masked) C is no multiple of ALIGNMENT. Both are within
TOLERANCE of the reference, relative by norm.
"""

import torch

from kernels.build.aligned_rows import ALIGNMENT
from kernels.build.fp8_gemm_blocks import MASKED
from kernels.build.operands import check_contiguous, check_ids, check_operand
from kernels.build.paths import best_path, note, path_of
from kernels.elementwise.quantise import check_counts
from kernels.gemm.fp8_gemm import TOLERANCE, check_operands, fp8_gemm_reference
from kernels.gemm.fp8_gemm_choice import faster_path

__all__ = ["TOLERANCE", "fp8_grouped_gemm_contiguous", "fp8_grouped_gemm_masked"]


def fp8_grouped_gemm_masked(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    counts: torch.Tensor,
    *,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`expected_rows`, the rows that an expert is likely to have (default: C), picks among paths
    of equal results. Raises ValueError for arguments that do not fit."""
    check_operands(x, x_scale, weight, w_scale)
    if x.dim() != 3 or weight.dim() != 3 or x.shape[0] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are no experts")
    check_counts(x, counts)
    expected_rows = x.shape[1] if expected_rows is None else expected_rows
    path = note("fp8_grouped_gemm", _masked_path(x, expected_rows, weight))
    if path == "deep_gemm" and x.numel():
        from kernels.gemm.fp8_gemm_deep_gemm import masked

        return masked((x, x_scale, weight, w_scale), counts, expected_rows)
    if path != "reference":
        from kernels.gemm.fp8_gemm_triton import masked

        return masked((x, x_scale, weight, w_scale), counts, expected_rows)
    return fp8_grouped_gemm_masked_reference(x, x_scale, weight, w_scale, counts)


def _masked_path(x: torch.Tensor, expected_rows: int, weight: torch.Tensor) -> str:
    path = best_path("fp8_grouped_gemm", x.device)
    if path != "deep_gemm":
        return path
    # NOTE: DeepGEMM writes whole blocks: with another capacity, over the next expert's rows.
    if x.shape[1] % ALIGNMENT:
        return "triton"
    return faster_path(x.device, MASKED, expected_rows, *weight.shape[1:])


def fp8_grouped_gemm_contiguous(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    expert_of: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Raises ValueError for arguments that do not fit, and on a CPU for experts that there are
    not."""
    check_operands(x, x_scale, weight, w_scale)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[0] % ALIGNMENT:
        raise ValueError(f"x must be [M, K] with M a multiple of 128, is {tuple(x.shape)}")
    check_operand("expert_of", expert_of, x.device, torch.int32, shape=x.shape[:1])
    check_operand("ends", ends, x.device, torch.int32, shape=weight.shape[:1])
    check_contiguous(expert_of=expert_of, ends=ends)
    check_ids("expert_of", expert_of, -1, len(weight))
    check_ids("ends", ends, 0, len(x) + 1)
    path = path_of("fp8_grouped_gemm", x.device)
    if path == "deep_gemm" and x.numel():
        from kernels.gemm import fp8_gemm_deep_gemm

        return fp8_gemm_deep_gemm.contiguous((x, x_scale, weight, w_scale), ends)
    if path == "triton":
        from kernels.gemm.fp8_gemm_triton import contiguous

        return contiguous((x, x_scale, weight, w_scale), expert_of)
    return fp8_grouped_gemm_contiguous_reference(x, x_scale, weight, w_scale, expert_of, ends)


def fp8_grouped_gemm_masked_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        here = x[expert, :count], x_scale[expert, :count]
        out[expert, :count] = fp8_gemm_reference(*here, weight[expert], w_scale[expert])
    return out


def fp8_grouped_gemm_contiguous_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    expert_of: torch.Tensor,
    _: torch.Tensor,
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    for expert in range(weight.shape[0]):
        rows = expert_of == expert
        out[rows] = fp8_gemm_reference(x[rows], x_scale[rows], weight[expert], w_scale[expert])
    return out
