"""A matrix to int4 with a scale for each 128 values of a row, rounded to nearest.

    weight[n, k] ~ value[n, k] * scale[n, k / 128],   value in -8 .. 7, scale bfloat16

Of scales between the one that just holds the largest value of a group and CLIP of it, the one with
the least squared error is taken: to clip a few values costs less than to round all the others
coarsely. Readers of the format take scales as bfloat16, so rounding is judged with those.
"""

import torch

from model.w4afp8 import GROUP

LARGEST = 7
SMALLEST = -8
CLIP = 0.55
NUM_SCALES = 19
# Rows that are worked on at once, so that the search needs little memory beside the weights.
_ROWS = 1024


def quantise_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] of any float type to ([N, K / 2] int8, [N, K / 128] bfloat16), on its device.

    ValueError when K is no multiple of 128, or a weight is not finite.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns are no multiple of {GROUP}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("some weights are not finite")
    packed = torch.empty(rows, columns // 2, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16, device=weight.device)
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        groups = weight[part].float().unflatten(-1, (-1, GROUP))
        scales[part] = _best_scales(groups)
        packed[part] = pack_nibbles(_rounded(groups, scales[part]).flatten(1))
    return packed, scales


def dequantise_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] float32, the inverse."""
    values = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2).float()
    return values * scales.float().repeat_interleave(GROUP, dim=-1)


def _best_scales(groups: torch.Tensor) -> torch.Tensor:
    """[N, G] bfloat16 of [N, G, 128] float32."""
    largest = groups.abs().amax(dim=-1)
    # A group of zeros still needs a scale.
    widest = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    best = least = None
    for ratio in torch.linspace(1.0, CLIP, NUM_SCALES).tolist():
        scales = (widest * ratio).to(torch.bfloat16)
        wrong = _rounded(groups, scales).mul_(scales.float().unsqueeze(-1)).sub_(groups)
        error = wrong.square_().sum(dim=-1)
        if best is None or least is None:
            best, least = scales, error
            continue
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    assert best is not None
    return best


def _rounded(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, G, 128] float32 of whole numbers."""
    # Scales of groups of tiny values may be zero in bfloat16.
    divisors = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    return (groups / divisors.unsqueeze(-1)).round_().clamp_(SMALLEST, LARGEST)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """[N, K] whole numbers to [N, K / 2] int8, even columns in the low nibbles."""
    nibbles = values.to(torch.int8).unflatten(-1, (-1, 2))
    return (nibbles[..., 0] & 15) | (nibbles[..., 1] << 4)
