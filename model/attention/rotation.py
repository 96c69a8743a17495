"""Table of rotations for every position: plain RoPE, or YaRN's blend of two frequency scales."""

import math

import torch

from model.config import RopeConfig


def rotation_table(config: RopeConfig, dim: int, max_position: int) -> torch.Tensor:
    """[max_position, dim / 2] complex64 on the CPU: exp(j * position * frequency[i]), times the
    attention factor."""
    angles = torch.outer(torch.arange(max_position).float(), frequencies(config, dim))
    return torch.polar(torch.full_like(angles, config.attention_factor), angles)


def frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """[dim / 2] float32, radians a token.

    YaRN keeps the high frequencies (more than `beta_fast` rotations over the original context),
    divides the low ones (fewer than `beta_slow`) by the factor, and blends those between.
    """
    periods = config.theta ** (torch.arange(0, dim, 2).float() / dim)
    if not config.yarn:
        return 1.0 / periods
    low = blend_bound(config, dim, config.beta_fast)
    high = blend_bound(config, dim, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def blend_bound(config: RopeConfig, dim: int, rotations: float) -> float:
    """The (fractional) dimension that turns `rotations` times over the original context."""
    turns = config.original_max_position / (rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(config.theta))
