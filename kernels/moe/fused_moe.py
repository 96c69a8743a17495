"""Routed experts of one rank without DeepGEMM: aligned rows, two grouped products, activation and
weighted sum.

    y[t, k]  = down[e] @ silu_mul(gate_up[e] @ hidden[t]),  e = topk_idx[t, k]
    out[t]   = sum over k of topk_weights[t, k] * y[t, k]                choices of -1 left out

    hidden        [T, H]      bfloat16 or float32
    topk_idx      [T, K]      int64 local experts in 0 .. E - 1, or -1: not here; on a device the
                              host does not read them, and others count as -1
    topk_weights  [T, K]      float32
    experts       `FusedExperts`
    out           [T, H]      dtype of hidden

With FP8 weights activations are quantised as in `quantise`, before each product. The Triton path is
within TOLERANCE of the reference, relative by norm. Block sizes are of `kernels.build.tuned`.
"""

import torch

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_ids, check_operand
from kernels.build.paths import path_of
from kernels.elementwise.combine import combine
from kernels.elementwise.quantise import quantise_reference
from kernels.elementwise.silu_mul import silu_mul_reference
from kernels.gemm.block_dequantise import block_dequantise
from kernels.moe.fused_experts import FusedExperts

TOLERANCE = 1e-2


def fused_moe(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: FusedExperts,
    *,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`expected_rows`, the rows that an expert is likely to have (default: as if all choices were
    here), picks among cuts of equal results. Raises ValueError for shapes, dtypes or devices that
    do not fit, and on a CPU for ids that are no experts."""
    if topk_idx.dim() != 2 or topk_idx.shape != topk_weights.shape or len(topk_idx) != len(hidden):
        shapes = [tuple(each.shape) for each in (hidden, topk_idx, topk_weights)]
        raise ValueError(f"hidden, topk_idx and topk_weights do not fit together: {shapes}")
    if hidden.dim() != 2 or hidden.shape[1] != experts.down.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit the experts")
    if not experts.is_fp8 and hidden.dtype != experts.gate_up.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weights {experts.gate_up.dtype}")
    device = experts.down.device
    check_operand("hidden", hidden, device, *FLOATS)
    check_operand("topk_idx", topk_idx, device, torch.int64)
    check_operand("topk_weights", topk_weights, device, torch.float32)
    check_ids("topk_idx", topk_idx, -1, len(experts.down))
    if path_of("fused_moe", hidden.device) == "triton":
        from kernels.moe.fused_moe_triton import launch

        return launch(hidden, topk_idx, topk_weights, experts, expected_rows)
    return fused_moe_reference(hidden, topk_idx, topk_weights, experts)


def fused_moe_reference(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: FusedExperts,
) -> torch.Tensor:
    rows = hidden.new_zeros(topk_idx.numel(), hidden.shape[1])
    for expert in range(experts.gate_up.shape[0]):
        chosen = (topk_idx.reshape(-1) == expert).nonzero().squeeze(1)
        x = hidden[chosen // topk_idx.shape[1]]
        both = _product(x, experts.gate_up, experts.gate_up_scale, expert).to(x.dtype)
        # What is quantised next is not rounded to bfloat16 before.
        inner = silu_mul_reference(both.float() if experts.is_fp8 else both)
        down = _product(inner, experts.down, experts.down_scale, expert)
        rows[chosen] = down.to(rows.dtype)
    numbers = torch.arange(topk_idx.numel(), device=hidden.device).view(topk_idx.shape)
    row_of = torch.where(topk_idx < 0, -1, numbers).t()
    return combine(rows, row_of, topk_weights)


def _product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """[N, K] @ [M, K] -> [N, M] float32."""
    wide = x.float()
    matrix = weight[expert].float()
    if scale is not None:
        values, factors = quantise_reference(x)
        wide = (values.float().unflatten(1, (-1, GROUP)) * factors.unsqueeze(-1)).flatten(1)
        matrix = block_dequantise(weight[expert], scale[expert], torch.float32)
    return wide @ matrix.t()
