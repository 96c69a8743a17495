"""Where Triton kernels are tested: on the GPU, or in Triton's interpreter where there is none."""

import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    _convert = interpreter._convert_float

    def _rounded(values: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        """The interpreter's own code loses the carry where rounding up to e4m3 reaches the next
        power of two: one value in thirty comes out as half of what it should be. Torch rounds."""
        if target != tl.float8e4nv or source != tl.float32:
            return _convert(values, source, target, mode)
        clamped = torch.from_numpy(np.atleast_1d(values)).clamp(-448, 448)
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    interpreter._convert_float = _rounded

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
    """Values and scales; one value in a thousand may be the one beside it."""
    torch.testing.assert_close(out[1], want[1], rtol=2e-6, atol=0)
    found, wanted = out[0].float(), want[0].float()
    assert int((found != wanted).sum()) <= 1e-3 * found.numel()
    torch.testing.assert_close(found, wanted, rtol=2**-3, atol=2**-8)
