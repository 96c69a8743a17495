"""Expert weights of a `w4afp8` checkpoint, in the order in which the W4A8 kernel reads them.

Checkpoint, per expert and projection:

    weight            [N, K / 2]    int8: two's complement nibbles, column 2i low and 2i + 1 high
    weight_scale_inv  [N, K / 128]  float32 or bfloat16: w[n, k] = value * scale[n, k / 128]

Packed: blocks of 128 rows x 128 columns, [E, N / 128, K / 128, BLOCK_BYTES] uint8. A block holds
two halves of 64 rows, then the 128 scales of its rows as float32, times 256. A half is what the
128 threads of a warpgroup hold as the A operand of four `wgmma` m64nNk32: two runs of 16 bytes a
thread, four bytes a pair of registers, rows 0..7 of the operand's 16 in the low nibbles, rows 8..15
in the high ones. A nibble is the zigzag code of its value: 2v for v >= 0, otherwise -2v - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

GROUP = 128
BLOCK_ROWS = 128
DATA_BYTES = 8192
BLOCK_BYTES = DATA_BYTES + 4 * BLOCK_ROWS
# The kernel reads a value v as v * 2^-8.
SCALE_FACTOR = 256.0

# Rows of a block are (half, warp, high, row), columns (step pair, step, column half, quad, byte).
_ROWS = (2, 4, 2, 8)
_COLUMNS = (2, 2, 2, 4, 4)
# From (E, N/128, rows, K/128, columns) to (E, N/128, K/128, half, pair, warp, row, quad, step,
# column half, byte, high).
_ORDER = (0, 1, 6, 2, 7, 3, 5, 10, 8, 9, 11, 4)
_INVERSE = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """blocks [E, N / 128, K / 128, BLOCK_BYTES] uint8, contiguous."""

    blocks: torch.Tensor

    @property
    def num_experts(self) -> int:
        return int(self.blocks.shape[0])

    @property
    def num_outputs(self) -> int:
        return int(self.blocks.shape[1]) * BLOCK_ROWS

    @property
    def num_inputs(self) -> int:
        return int(self.blocks.shape[2]) * GROUP


def pack_weights(
    weights: Sequence[torch.Tensor] | torch.Tensor,
    weight_scale_inv: Sequence[torch.Tensor] | torch.Tensor,
    device: torch.device | str | None = None,
) -> PackedWeights:
    """Packs one projection of all experts, one expert at a time.

    weights           E of [N, K / 2] int8 (or uint8, the same bits), or [E, N, K / 2]
    weight_scale_inv  E of [N, K / 128] float32 or bfloat16, or [E, N, K / 128]
    device            of the result; where the weights are, when None

    Raises ValueError for anything else, and where N or K is no multiple of 128.
    """
    if not len(weights) or len(weights) != len(weight_scale_inv):
        raise ValueError(f"{len(weights)} experts' weights, {len(weight_scale_inv)} of scales")
    rows, half_columns = weights[0].shape
    columns = 2 * half_columns
    if not rows or not columns or rows % BLOCK_ROWS or columns % GROUP:
        raise ValueError(f"W4A8 weights of {rows} x {columns}: not multiples of 128")
    device = weights[0].device if device is None else torch.device(device)
    blocks = torch.empty(
        (len(weights), rows // BLOCK_ROWS, columns // GROUP, BLOCK_BYTES),
        dtype=torch.uint8,
        device=device,
    )
    for expert, (weight, scale) in enumerate(zip(weights, weight_scale_inv, strict=True)):
        _check(expert, weight, scale, rows, columns)
        _pack_expert(blocks[expert], weight.to(device), scale.to(device))
    return PackedWeights(blocks)


def unpack_weights(packed: PackedWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [E, N, K] int8 and their scales [E, N, K / 128] float32."""
    num_experts, tall, wide, _ = packed.blocks.shape
    data = packed.blocks[..., :DATA_BYTES]
    codes = torch.stack((data & 15, data >> 4), dim=-1)
    shape = (num_experts, tall, *_ROWS, wide, *_COLUMNS)
    codes = codes.view([shape[axis] for axis in _ORDER]).permute(_INVERSE)
    codes = codes.reshape(num_experts, tall * BLOCK_ROWS, wide * GROUP)
    magnitudes = (codes >> 1).to(torch.int8)
    values = torch.where(codes & 1 == 1, ~magnitudes, magnitudes)
    scales = packed.blocks[..., DATA_BYTES:].contiguous().view(torch.float32) / SCALE_FACTOR
    return values, scales.transpose(2, 3).reshape(num_experts, tall * BLOCK_ROWS, wide)


def dequantise_weights(packed: PackedWeights) -> torch.Tensor:
    """[E, N, K] float32: values times scales, in half the time that `unpack_weights` takes."""
    num_experts, tall, wide, _ = packed.blocks.shape
    values, order = _tables(packed.blocks.device)
    pairs = F.embedding(packed.blocks[..., :DATA_BYTES].int(), values)
    blocks = pairs.view(-1, 2 * DATA_BYTES).index_select(-1, order)
    blocks = blocks.view(num_experts, tall, wide, BLOCK_ROWS, GROUP)
    scales = packed.blocks[..., DATA_BYTES:].contiguous().view(torch.float32) / SCALE_FACTOR
    matrices = blocks.mul_(scales.unsqueeze(-1)).transpose(2, 3)
    return matrices.reshape(num_experts, tall * BLOCK_ROWS, wide * GROUP)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two values of a byte [256, 2], and where in a block's nibbles each of its weights is
    [rows * columns]."""
    byte = torch.arange(256)
    codes = torch.stack((byte & 15, byte >> 4), dim=-1)
    values = torch.where(codes & 1 == 1, ~(codes >> 1), codes >> 1).float()
    shape = (1, 1, *_ROWS, 1, *_COLUMNS)
    places = torch.arange(2 * DATA_BYTES).view([shape[axis] for axis in _ORDER])
    return values.to(device), places.permute(_INVERSE).reshape(-1).to(device)


def _check(expert: int, weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> None:
    if weight.dtype not in (torch.int8, torch.uint8) or weight.shape != (rows, columns // 2):
        raise ValueError(
            f"int4 weight of expert {expert}: {tuple(weight.shape)} {weight.dtype}, "
            f"not {(rows, columns // 2)} int8"
        )
    if scale.dtype not in (torch.float32, torch.bfloat16) or scale.shape != (
        rows,
        columns // GROUP,
    ):
        raise ValueError(
            f"weight_scale_inv of expert {expert}: {tuple(scale.shape)} {scale.dtype}, "
            f"not {(rows, columns // GROUP)} float32 or bfloat16"
        )


def _pack_expert(blocks: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """blocks [N / 128, K / 128, BLOCK_BYTES] of one expert, written."""
    tall, wide, _ = blocks.shape
    nibbles = weight.contiguous().view(torch.int8)
    values = torch.stack(((nibbles << 4) >> 4, nibbles >> 4), dim=-1)
    codes = ((values << 1) ^ (values >> 7)).view(torch.uint8)
    codes = codes.view(1, tall, *_ROWS, wide, *_COLUMNS).permute(_ORDER)
    codes = codes.reshape(tall, wide, DATA_BYTES, 2)
    blocks[..., :DATA_BYTES] = codes[..., 0] | (codes[..., 1] << 4)
    scales = (scale.float() * SCALE_FACTOR).view(tall, BLOCK_ROWS, wide).transpose(1, 2)
    blocks[..., DATA_BYTES:] = scales.contiguous().view(torch.uint8)
