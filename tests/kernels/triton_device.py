"""Where Triton kernels are tested: on the GPU, or in Triton's interpreter where there is none."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# A parameter `device` for tests: small shapes in the interpreter, the same code on a GPU.
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the GPU runs these kernels here")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def dtypes() -> tuple[torch.dtype, ...]:
    """The interpreter does not round to bfloat16 as the hardware does."""
    return (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16)


def assert_same_fp8(
    out: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Values and scales. NOTE: the interpreter loses the carry when rounding up to e4m3 reaches
    the next power of two: some values come out as half of what they should be."""
    torch.testing.assert_close(out[1], want[1], rtol=2e-6, atol=0)
    found, wanted = out[0].float(), want[0].float()
    allowed = 0.05 if INTERPRETED else 1e-3
    assert int((found != wanted).sum()) <= allowed * found.numel()
    rtol = 0.5 if INTERPRETED else 2**-3
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=2**-8)
