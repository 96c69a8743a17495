"""Expert weights of a `w4afp8` checkpoint, in the order in which the W4A8 kernel reads them.

Checkpoint, per expert and projection:

    weight            [N, K / 2]    int8: two's complement nibbles, column 2i low and 2i + 1 high
    weight_scale_inv  [N, K / 128]  float32 or bfloat16: w[n, k] = value * scale[n, k / 128]

Packed: blocks of 128 rows x 128 columns, [E, N / 128, K / 128, BLOCK_BYTES] uint8. A block holds
two halves of 64 rows, then a share for each of its 128 rows, then a unit for each. A half is what
the 128 threads of a warpgroup hold as the A operand of four `wgmma` m64nNk32: two runs of 16 bytes
a thread, four bytes, a word, for a pair of registers. Byte i of a word is that of both registers:
of one of rows 0..7 of the operand's 16, the low value, and of one of rows 8..15, the high one.
Operand row r of a warp, r < 8, is row 4r + 2 * half of its 32, and r + 8 the next: a thread's four
results of a token are neighbours. Shares and units are in the order of the rows.

A scale is a bfloat16 power of two, the unit, the same in all blocks of a row, times a float16, the
share: at most 1/8, and no less than 1/16 for the largest of its row. The kernel sums in float16,
and what it sums stays of one size. A scale that is not bfloat16 is so rounded to 11 bits, and one
that is less than 1/1024 of its row's largest to fewer. Of units the kernel reads those of one block
a tile; the others are there so that blocks begin at multiples of 512 bytes.

There are two codes; 128 rows have one of them, and the sign of their shares, scales being never
negative in themselves, says which:

    signed    shares times -1, units times 512. Of the negated values byte i has the low one's sign
              in bit 7 and magnitude in bits 0..2, the high one's sign in bit 3 and its magnitude in
              bits 4..6 of byte i - 1 (of byte 3 for i = 0): a mask, or a rotation by four and the
              same mask, make e4m3 of them.
    zigzag    units times 256, where there is a -8, which the other lacks. 2v for v >= 0, otherwise
              -2v - 1: the low value in the low nibble, the high one in the high nibble.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from kernels.build.operands import check_operand
from kernels.build.paths import path_of

# To be raised whenever bytes of a block come to mean something else: ranks exchange them.
LAYOUT_VERSION = 2
GROUP = 128
BLOCK_ROWS = 128
DATA_BYTES = 8192
# What a product reads of a block, and with units.
READ_BYTES = DATA_BYTES + 2 * BLOCK_ROWS
BLOCK_BYTES = READ_BYTES + 2 * BLOCK_ROWS
TRITON_SIZES = {"rows": BLOCK_ROWS, "group": GROUP, "data_bytes": DATA_BYTES}
# The kernel reads a value v as -v * 2^-9 where it is signed, as v * 2^-8 in zigzag.
SIGNED_FACTOR = -512.0
ZIGZAG_FACTOR = 256.0
# Of 2^k by k where the largest scale of a row is in [2^(k - 1), 2^k).
_UNIT_SHIFT = 3
# Powers of two that a unit may be: normal ones, with their factor, as float32 and bfloat16.
_LEAST_UNIT, _LARGEST_UNIT = -126, 118

# Rows of a block are (warp, row, half, high), columns (step pair, step, column half, quad, byte).
_ROWS = (4, 8, 2, 2)
_COLUMNS = (2, 2, 2, 4, 4)
# From (E, N/128, rows, K/128, columns) to (E, N/128, K/128, half, pair, warp, row, quad, step,
# column half, byte, high).
_ORDER = (0, 1, 6, 4, 7, 2, 3, 10, 8, 9, 11, 5)
_INVERSE = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """blocks [E, N / 128, K / 128, BLOCK_BYTES] uint8, contiguous and aligned to 16 bytes. Raises
    ValueError for others."""

    blocks: torch.Tensor

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != BLOCK_BYTES:
            raise ValueError(
                f"packed weights are [E, N / 128, K / 128, {BLOCK_BYTES}] uint8, "
                f"not {list(blocks.shape)} {blocks.dtype}"
            )
        if not blocks.is_contiguous() or blocks.data_ptr() % 16:
            raise ValueError("packed weights are contiguous and aligned to 16 bytes")

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
    """Packs one projection of all experts.

    weights           E of [N, K / 2] int8 (or uint8, the same bits), or [E, N, K / 2]
    weight_scale_inv  E of [N, K / 128] float32 or bfloat16, or [E, N, K / 128]
    device            of the result; where the weights are, when None

    Raises ValueError for anything else, where N or K is no multiple of 128, and for a -8 with a
    negative scale.
    """
    blocks, is_unfit = pack_blocks(weights, weight_scale_inv, device)
    if bool(is_unfit.any()):
        raise ValueError("int4 weights of -8 with a negative scale")
    return PackedWeights(blocks)


def pack_blocks(
    weights: Sequence[torch.Tensor] | torch.Tensor,
    weight_scale_inv: Sequence[torch.Tensor] | torch.Tensor,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and nothing waits for the device: blocks, and whether they are of no use for a -8
    with a negative scale, [E, N / 128] bool."""
    if not len(weights) or len(weights) != len(weight_scale_inv):
        raise ValueError(f"{len(weights)} experts' weights, {len(weight_scale_inv)} of scales")
    rows, half_columns = weights[0].shape
    columns = 2 * half_columns
    if not rows or not columns or rows % BLOCK_ROWS or columns % GROUP:
        raise ValueError(f"W4A8 weights of {rows} x {columns}: not multiples of 128")
    for expert, (weight, scale) in enumerate(zip(weights, weight_scale_inv, strict=True)):
        name, both = f"int4 weight of expert {expert}", (torch.int8, torch.uint8)
        check_operand(name, weight, weight.device, *both, shape=(rows, columns // 2))
        name, both = f"weight_scale_inv of expert {expert}", (torch.float32, torch.bfloat16)
        check_operand(name, scale, scale.device, *both, shape=(rows, columns // GROUP))
    device = weights[0].device if device is None else torch.device(device)
    nibbles = _stacked(weights, device).view(torch.int8)
    scales = _stacked(weight_scale_inv, device).float()
    tall, wide = rows // BLOCK_ROWS, columns // GROUP
    shape = (len(weights), tall, wide, BLOCK_BYTES)
    blocks = torch.empty(shape, dtype=torch.uint8, device=device)
    if path_of("w4a8_packing", device) == "triton":
        from kernels.moe.w4a8_grouped_gemm_packing_triton import launch

        is_signed, is_unfit = launch(blocks, nibbles, scales, **TRITON_SIZES)
    else:
        is_signed, is_unfit = pack_values_reference(blocks, nibbles, scales)
    _pack_scales(blocks, scales, is_signed)
    return blocks, is_unfit


def _stacked(matrices: Sequence[torch.Tensor] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Contiguous."""
    if isinstance(matrices, torch.Tensor):
        return matrices.to(device).contiguous()
    return torch.stack([matrix.to(device) for matrix in matrices])


def dequantise_weights(packed: PackedWeights) -> torch.Tensor:
    """[E, N, K] float32: values times scales."""
    num_experts, tall, wide, _ = packed.blocks.shape
    table, order = _tables(packed.blocks.device)
    pairs = F.embedding(_table_rows(packed.blocks), table)
    blocks = pairs.view(-1, 2 * DATA_BYTES).index_select(-1, order)
    blocks = blocks.view(num_experts, tall, wide, BLOCK_ROWS, GROUP)
    matrices = blocks.mul_(_scales(packed.blocks).unsqueeze(-1)).transpose(2, 3)
    return matrices.reshape(num_experts, tall * BLOCK_ROWS, wide * GROUP)


def _stored_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares [E, N / 128, K / 128, 128] float16 and units, the same of bfloat16."""
    shares, units = blocks[..., DATA_BYTES:].chunk(2, dim=-1)
    return shares.view(torch.float16), units.view(torch.bfloat16)


def _scales(blocks: torch.Tensor) -> torch.Tensor:
    """As they were, but for rounding: [E, N / 128, K / 128, 128] float32."""
    shares, units = _stored_scales(blocks)
    factor = torch.where(shares[..., :1].signbit(), SIGNED_FACTOR, ZIGZAG_FACTOR)
    return shares.float() * (units.float() / factor)


def _table_rows(blocks: torch.Tensor) -> torch.Tensor:
    """Which pair of values of `_tables` each byte of data has, [E, N / 128, K / 128, DATA_BYTES]
    int32."""
    data = blocks[..., :DATA_BYTES].contiguous()
    signed = _stored_scales(blocks)[0][..., :1].signbit()
    rows = torch.where(signed, _turned(data, 1), data).int()
    return rows.add_(signed, alpha=256)


def _turned(data: torch.Tensor, places: int) -> torch.Tensor:
    """Contiguous bytes [..., bytes] with bits 4..6 of each moved by 1 or -1 bytes of its word."""
    words = data.view(torch.int32)
    moved = words & 0x70707070
    shift = 8 * places % 32
    return (words ^ moved | moved << shift | moved >> 32 - shift).view(torch.uint8)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and the high value of a byte [512, 2], in zigzag and then signed with what `_turned`
    has brought back, and where in a block's pairs each of its weights is [rows * columns]."""
    byte = torch.arange(256)
    codes = torch.stack((byte & 15, byte >> 4), dim=-1)
    zigzag = torch.where(codes & 1 == 1, ~(codes >> 1), codes >> 1)
    magnitudes = torch.stack((byte & 7, byte >> 4 & 7), dim=-1)
    negated = torch.stack((byte & 0x80, byte & 8), dim=-1) == 0
    signed = torch.where(negated, -magnitudes, magnitudes)
    shape = (1, 1, *_ROWS, 1, *_COLUMNS)
    places = torch.arange(2 * DATA_BYTES).view([shape[axis] for axis in _ORDER])
    values = torch.cat((zigzag, signed)).float()
    return values.to(device), places.permute(_INVERSE).reshape(-1).to(device)


def pack_values_reference(
    blocks: torch.Tensor, nibbles: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the data of blocks [E, N / 128, K / 128, BLOCK_BYTES] of nibbles [E, N, K / 2] int8;
    of scales [E, N, K / 128] float32 only the signs count. Which 128 rows are signed, and which
    have a -8 with a negative scale: [E, N / 128] bool."""
    experts, tall, wide, _ = blocks.shape
    values = torch.stack(((nibbles << 4) >> 4, nibbles >> 4), dim=-1)
    values = values.view(experts, tall, BLOCK_ROWS, wide, GROUP)
    is_negative = scales.view(experts, tall, BLOCK_ROWS, wide, 1) < 0
    values = torch.where(is_negative, -values, values)
    flat = values.flatten(2)
    is_signed, is_unfit = (flat != -8).all(dim=2), (flat > 7).any(dim=2)
    values = values.view(experts, tall, *_ROWS, wide, *_COLUMNS).permute(_ORDER)
    low, high = values.reshape(experts, tall, wide, DATA_BYTES, 2).unbind(-1)
    chosen = is_signed[:, :, None, None]
    blocks[..., :DATA_BYTES] = torch.where(chosen, _signed(low, high), _zigzag(low, high))
    return is_signed, is_unfit


def _pack_scales(blocks: torch.Tensor, scales: torch.Tensor, is_signed: torch.Tensor) -> None:
    """Writes shares and units; operands as of `pack_values_reference`."""
    experts, tall, wide, _ = blocks.shape
    factor = torch.where(is_signed[:, :, None, None], SIGNED_FACTOR, ZIGZAG_FACTOR)
    shares, units = _stored_scales(blocks)
    scales = scales.abs().view(experts, tall, BLOCK_ROWS, wide).transpose(2, 3)
    unit = _units(scales)
    shares.copy_(scales / unit * factor.sign())
    units.copy_(unit * factor.abs())


def _units(scales: torch.Tensor) -> torch.Tensor:
    """[..., wide, 128] scales of rows to [..., 1, 128], what they are shares of; float32."""
    exponent = torch.frexp(scales.amax(dim=-2, keepdim=True)).exponent
    exponent = (exponent + _UNIT_SHIFT).clamp(_LEAST_UNIT, _LARGEST_UNIT)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _signed(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Bytes of pairs of values -7 .. 7, int8; the same shape."""
    signs = (low > 0).byte() << 7 | (high > 0).byte() << 3
    return _turned(signs | low.abs().byte() | high.abs().byte() << 4, -1)


def _zigzag(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The same of values -8 .. 7."""
    return ((low << 1) ^ (low >> 7)).byte() | ((high << 1) ^ (high >> 7)).byte() << 4
