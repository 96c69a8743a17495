"""Block FP8, the format of the public DeepSeek-V3 checkpoints.

A weight [N, K] is cut into 128 x 128 blocks; a block is stored as e4m3 times one FP32 scale,
`weight_scale_inv` [ceil(N / 128), ceil(K / 128)], so that weight = stored * scale. Blocks at the
edges may be smaller.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

BLOCK = 128
_E4M3_MAX = 448.0


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] float to ([..., N, K] float8_e4m3fn, [..., ceil(N/128), ceil(K/128)] float32
    scales).
    """
    weight = weight.float()
    amax = (
        _pad(weight).unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).abs().amax(dim=(-3, -1))
    )
    scale = torch.where(amax > 0, amax / _E4M3_MAX, torch.ones_like(amax))
    stored = (weight / _spread(scale, weight)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return stored, scale


def dequantise_blocks(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `quantise_blocks`, in float32."""
    return stored.float() * _spread(scale, stored)


@contextmanager
def rounded(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Within, the parameters hold what FP8 would keep of them; afterwards their own values again.

    Gradients taken within belong to the rounded values and are applied to the exact ones (straight
    through).
    """
    with torch.no_grad():
        exact = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(dequantise_blocks(*quantise_blocks(parameter)))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, exact, strict=True):
                parameter.copy_(value)


def _pad(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    return torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))


def _spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One scale per element: [..., ceil(N/128), ceil(K/128)] to the shape of `like`."""
    rows, columns = like.shape[-2:]
    return scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[
        ..., :columns
    ]
