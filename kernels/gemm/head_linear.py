"""One projection per attention head: the two products around absorbed attention.

    out[t, h, n] = sum over k of x[t, h, k] * weight[h, n, k]  (* scale[h, n / 128, k / 128])

    x       [T, heads, K]  float32 or bfloat16; may be a slice of longer vectors
    weight  [heads, N, K]  same dtype, any strides; or, with a scale, float8_e4m3fn, contiguous
    scale   [heads, N / 128, K / 128] float32, rounded up at the edges; or None
    out     [T, heads, N]  dtype of x; written to where it is given, which may be a slice too,
            else a view with heads outermost in memory

With FP8 weights x is not quantised. Where N and K are multiples of 128 a GPU multiplies these by
Triton, within TOLERANCE of the reference, relative by norm; all others by a batched product. On a
CPU the bits of a token do not depend on the other tokens, as in `kernels.gemm.linear`.
"""

import torch
import torch.nn.functional as F

from kernels.build.operands import FLOATS, check_operand
from kernels.build.paths import best_path, note
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from kernels.gemm.linear import MIN_ROWS

TOLERANCE = 5e-3  # of bfloat16; float32: 1e-5


def head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit, and unless FP8 weights come
    with a scale of their shape."""
    _check(x, weight, out)
    path = note("head_linear", path_for(weight, scale))
    if scale is not None or weight.dtype == torch.float8_e4m3fn:
        check_scale(weight, scale)
        if path == "triton":
            from kernels.gemm.head_linear_triton import launch

            return launch(x, weight, scale, out)
        return head_linear_reference(x, weight, out, scale=scale)
    num_rows = x.shape[0]
    if out is not None and not x.is_cpu:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
    if 0 < num_rows < MIN_ROWS and x.is_cpu:
        x = F.pad(x, (0, 0, 0, 0, 0, MIN_ROWS - num_rows))
    product = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:num_rows]
    return product if out is None else out.copy_(product)


def path_for(weight: torch.Tensor, scale: torch.Tensor | None) -> str:
    """ "cublas" is torch's batched product."""
    path = best_path("head_linear", weight.device)
    if path == "reference":
        return path
    if scale is None:
        return "cublas"
    is_whole = all(size % BLOCK == 0 for size in weight.shape[1:])
    return path if is_whole else "reference"


def head_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float32."""
    wide = weight.float()
    if scale is not None:
        pairs = zip(weight, scale, strict=True)
        wide = torch.stack([block_dequantise(*pair, torch.float32) for pair in pairs])
    product = head_linear(x.float(), wide).to(x.dtype)
    return product if out is None else out.copy_(product)


def _check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> None:
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[::2]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    check_operand("x", x, x.device, *FLOATS)
    check_operand("weight", weight, x.device, x.dtype, torch.float8_e4m3fn)
    if out is not None:
        shape = (*x.shape[:2], weight.shape[1])
        check_operand("out", out, x.device, x.dtype, shape=shape)


def check_scale(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    heads, rows, columns = weight.shape
    if weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous float8_e4m3fn, is {weight.dtype}")
    shape = (heads, -(-rows // BLOCK), -(-columns // BLOCK))
    if scale is None:
        raise ValueError(f"scale must be {shape} float32, is None")
    check_operand("scale", scale, weight.device, torch.float32, shape=shape)
