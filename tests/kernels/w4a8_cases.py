"""Experts and activations for tests of the W4A8 grouped GEMM."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.moe.w4a8_grouped_gemm_packing import (
    BLOCK_ROWS,
    DATA_BYTES,
    GROUP,
    PackedWeights,
    _scales,
    _table_rows,
    _tables,
)

Experts = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[torch.Generator, int, int, int], Experts]


def experts(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """As a checkpoint holds them: every nibble occurs, -8 too."""
    weight = torch.randint(-128, 128, (num, n, k // 2), generator=rng, dtype=torch.int8)
    scale = torch.rand(num, n, k // 128, generator=rng) * 0.01 + 0.001
    return weight, scale


def symmetric(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """Without a -8."""
    weight, scale = experts(rng, num, n, k)
    for smallest, one in ((0x08, 0x01), (0x80, 0x10)):
        weight ^= (weight.view(torch.uint8) & 15 * one == smallest).to(torch.int8) * one
    return weight, scale


def mixed(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """Every third 128 rows have every nibble, the rest no -8."""
    weight, scale = symmetric(rng, num, n, k)
    other = weight.view(-1, 128, k // 2)[::3]
    other.copy_(torch.randint(-128, 128, other.shape, generator=rng, dtype=torch.int8))
    return weight, scale


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Values of packed nibbles, by Python arithmetic on each byte."""
    signed = torch.tensor([v - 16 if v > 7 else v for v in range(16)], dtype=torch.int8)
    bits = weight.view(torch.uint8).int()
    return torch.stack((signed[bits % 16], signed[bits // 16]), dim=-1).flatten(-2)


def rows(rng: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, generator=rng).clamp(-4, 4) * 100
    scales = torch.rand(*shape[:-1], shape[-1] // 128, generator=rng) * 0.02 + 0.001
    return x.to(torch.float8_e4m3fn), scales


def unpack_weights(packed: PackedWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [E, N, K] int8 and their scales [E, N, K / 128] float32, none negative."""
    num_experts, tall, wide, _ = packed.blocks.shape
    table, order = _tables(packed.blocks.device)
    values = F.embedding(_table_rows(packed.blocks), table).view(-1, 2 * DATA_BYTES)
    values = values.index_select(-1, order).to(torch.int8)
    values = values.view(num_experts, tall, wide, BLOCK_ROWS, GROUP).transpose(2, 3)
    shape = (num_experts, tall * BLOCK_ROWS, -1)
    return values.reshape(shape), _scales(packed.blocks).transpose(2, 3).reshape(shape)
