"""Attention over a long prefix in pieces: joins what two disjoint sets of keys gave.

    lse[t, h]  = log(exp(lse_a[t, h]) + exp(lse_b[t, h]))
    out[t, h]  = exp(lse_a - lse) * a[t, h] + exp(lse_b - lse) * b[t, h]

    a, b          [T, heads, V]  bfloat16 or float32: softmax-weighted values over one set each
    lse_a, lse_b  [T, heads]     float32, natural logarithm of the sum of exp(scores); -inf: no key
    out, lse      as a, as lse_a; zeros and -inf where neither set had a key

In float32; the Triton path agrees with the reference within 1e-5 (bfloat16: one bit).
"""

import torch

from kernels.build.operands import FLOATS, check_operand
from kernels.build.paths import path_of


def merge_states(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). Raises ValueError for shapes, dtypes or devices that do not fit."""
    if a.shape != b.shape or not lse_a.shape == lse_b.shape == a.shape[:2] or a.dim() != 3:
        shapes = [tuple(each.shape) for each in (a, lse_a, b, lse_b)]
        raise ValueError(f"states do not fit together: {shapes}")
    device = a.device
    check_operand("a", a, device, *FLOATS)
    check_operand("b", b, device, a.dtype)
    check_operand("lse_a", lse_a, device, torch.float32)
    check_operand("lse_b", lse_b, device, torch.float32)
    if path_of("merge_states", a.device) == "triton":
        from kernels.attention.merge_states_triton import launch

        return launch(a, lse_a, b, lse_b)
    return merge_states_reference(a, lse_a, b, lse_b)


def merge_states_reference(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    # Without any key the difference would be inf - inf.
    shift = torch.where(lse.isneginf(), 0.0, lse)
    out = a.float() * (lse_a - shift).exp().unsqueeze(-1)
    out += b.float() * (lse_b - shift).exp().unsqueeze(-1)
    return out.to(a.dtype), lse
