"""A matrix to int4 with a scale for each 128 values of a row, rounded to nearest.

    weight[n, k] ~ value[n, k] * scale[n, k / 128],   value in -8 .. 7, scale bfloat16

Of scales between the one that just holds the largest value of a group and CLIP of it, the one with
the least squared error is taken: to clip a few values costs less than to round all the others
coarsely. Readers of the format take scales as bfloat16, so rounding is judged with those.

CPUs and GPUs give the same bits. For the search, weights become whole multiples of a power of two
of which scales are multiples as well, 256 to 511 for the largest one. Errors and the sums of their
squares are then whole numbers that float32 holds, in whatever order they are added; a sum that
leaves its range is larger than that of the first scale, and is not taken.
"""

import torch

from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from model.w4afp8 import GROUP

LARGEST = 7
SMALLEST = -8
CLIP = 0.55
NUM_SCALES = 19
# Weights that are worked on at once: few enough for caches, more than it takes to start a kernel.
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 22}
# Exponent bits of the smallest scale whose inverse unit is a float32.
_LEAST_EXPONENT = 8


def quantise_int4(
    weight: torch.Tensor, scale_inv: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] of any float type to ([N, K / 2] int8, [N, K / 128] bfloat16), on its device. Of
    float8_e4m3fn with `scale_inv` [ceil(N / 128), ceil(K / 128)], as `block_dequantise` takes it.

    ValueError when K is no multiple of 128, or a weight is not finite.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns are no multiple of {GROUP}")
    packed = torch.empty(rows, columns // 2, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16, device=weight.device)
    step = max(_CHUNK[weight.device.type] // columns // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if scale_inv is None:
            floats = weight[part].float()
        else:
            blocks = slice(start // BLOCK, -(-min(start + step, rows) // BLOCK))
            floats = block_dequantise(weight[part], scale_inv[blocks], torch.float32)
        groups = floats.view(-1, GROUP)
        best = _best_scales(groups)
        scales[part] = best.view(-1, columns // GROUP)
        packed[part] = pack_nibbles(_rounded(groups, best)).view(-1, columns // 2)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("some weights are not finite")
    return packed, scales


def dequantise_int4(
    packed: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, K] float32, the inverse. Values whose `zero_points` [N, K / 128] are not 8 are larger by
    8 less these."""
    values = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2).float()
    if zero_points is not None:
        values += (8 - zero_points.float()).repeat_interleave(GROUP, dim=-1)
    return values * scales.float().repeat_interleave(GROUP, dim=-1)


def _best_scales(groups: torch.Tensor) -> torch.Tensor:
    """[G] bfloat16 of [G, 128] float32; not finite where a weight is not."""
    largest = groups.abs().amax(dim=-1)
    # A group of zeros still needs a scale. (GPUs divide by a number as they multiply.)
    widest = torch.where(largest == 0, 1.0, largest * (1 / LARGEST))
    best = widest.to(torch.bfloat16)
    per_unit = _units(best)
    whole = (groups * per_unit.unsqueeze(-1)).round_()
    least = torch.full_like(widest, torch.inf)
    scratch = torch.empty_like(whole)
    for ratio in torch.linspace(1.0, CLIP, NUM_SCALES).tolist():
        scales = (widest * ratio).to(torch.bfloat16)
        steps = (scales.float() * per_unit).round_().clamp_min_(1).unsqueeze(-1)
        torch.div(whole, steps, out=scratch).round_().clamp_(SMALLEST, LARGEST)
        torch.addcmul(whole, scratch, steps, value=-1, out=scratch)
        error = torch.mul(scratch, scratch, out=scratch).sum(dim=-1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _units(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two that bring scales, bfloat16, to 256 .. 511: float32."""
    exponents = (scales.float().view(torch.int32) >> 23).clamp_min_(_LEAST_EXPONENT)
    return ((2 * 127 + 8 - exponents) << 23).view(torch.float32)


def _rounded(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[G, 128] float32 of whole numbers."""
    # Scales of groups of tiny values may be zero in bfloat16.
    divisors = scales.float().clamp_min_(torch.finfo(torch.float32).tiny)
    return (groups / divisors.unsqueeze(-1)).round_().clamp_(SMALLEST, LARGEST)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """[N, K] whole numbers to [N, K / 2] int8, even columns in the low nibbles."""
    pairs = values.to(torch.int8).contiguous().view(torch.int16)
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.int8)
