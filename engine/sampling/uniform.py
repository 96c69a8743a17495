"""Random numbers that depend on (seed, position) only, the same on every device.

u(seed, position) = mix(mix(seed) + (position + 1) * GAMMA) / 2**64, where mix is the finaliser
of splitmix64 and all arithmetic is modulo 2**64. A request that moves to another worker in
mid-stream, or is prefilled again, draws the same numbers.
"""

import torch

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def seeds_to_int64(seeds: list[int]) -> list[int]:
    """Unsigned 64-bit seeds as torch can hold them; larger or negative ones are wrapped."""
    return [_signed(seed) for seed in seeds]


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[S] int64, [S] int64 -> [S] float64 in [0, 1), 53 random bits each."""
    mixed = _mix(_mix(seeds) + (positions + 1) * _GAMMA)
    return _shift_right(mixed, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own one copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
