"""Triton path of `pack_blocks`: one look at all of 128 rows for what their code must hold, then a
program a block, which gathers each byte's two values."""

import torch
import triton
import triton.language as tl

from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, BLOCK_ROWS, DATA_BYTES, GROUP


@triton.jit(do_not_specialize=["wide"])
def _look(nibbles, scales, is_signed, is_unfit, wide, rows: tl.constexpr, group: tl.constexpr):
    """A program `rows` rows."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    byte = tl.arange(0, group // 2)
    least = tl.zeros([rows, group // 2], tl.int32)
    unfit = tl.zeros([rows, group // 2], tl.int32)
    for block in range(wide):
        places = (row * wide + block)[:, None] * (group // 2) + byte[None, :]
        both = tl.load(nibbles + places).to(tl.int32)
        has_least = ((both & 15) == 8) | ((both & 240) == 128)
        is_negative = (tl.load(scales + row * wide + block) < 0)[:, None]
        least |= (has_least & (is_negative == 0)).to(tl.int32)
        unfit |= (has_least & is_negative).to(tl.int32)
    tl.store(is_signed + tl.program_id(0), tl.max(tl.max(least, 1), 0) == 0)
    tl.store(is_unfit + tl.program_id(0), tl.max(tl.max(unfit, 1), 0) != 0)


@triton.jit
def _values(nibbles, scales, row, column, block, wide, group: tl.constexpr):
    """Of places in a block; the signs of their scales are theirs."""
    both = tl.load(nibbles + (row * wide + block) * (group // 2) + column // 2).to(tl.int32)
    values = tl.where(column % 2 == 0, both << 28, both << 24) >> 28
    return tl.where(tl.load(scales + row * wide + block) < 0, -values, values)


@triton.jit(do_not_specialize=["wide"])
def _pack(
    nibbles, scales, is_signed, blocks, wide, rows: tl.constexpr, group: tl.constexpr,
    data_bytes: tl.constexpr, block_bytes: tl.constexpr,
):  # fmt: skip
    """A program a block of `rows` rows: `block` of `wide`."""
    tall, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # As bytes follow each other: half, pair of steps, warp, row, quad, step, half of columns, byte.
    place = tl.arange(0, data_bytes)
    byte = place % 4
    row = tall * rows + place // 512 % 4 * 32 + place // 64 % 8 * 4 + place // 4096 * 2
    column = (
        place // 2048 % 2 * 64 + place // 8 % 2 * 32 + place // 4 % 2 * 16 + place // 16 % 4 * 4
    )
    low = _values(nibbles, scales, row, column + byte, block, wide, group)
    high = _values(nibbles, scales, row + 1, column + byte, block, wide, group)
    if tl.load(is_signed + tall):
        after = _values(nibbles, scales, row + 1, column + (byte + 1) % 4, block, wide, group)
        signs = (low > 0).to(tl.int32) * 128 + (high > 0).to(tl.int32) * 8
        out = signs + tl.abs(low) + tl.abs(after) * 16
    else:
        out = (low << 1 ^ low >> 31) + (high << 1 ^ high >> 31) * 16
    tl.store(blocks + (tall * wide + block) * block_bytes + place, out.to(tl.uint8))


def launch(
    blocks: torch.Tensor, nibbles: torch.Tensor, scales: torch.Tensor, *, num_warps: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `pack_values_reference`; all contiguous."""
    experts, tall, wide, _ = blocks.shape
    is_signed, is_unfit = torch.empty(
        (2, experts, tall), dtype=torch.bool, device=blocks.device
    ).unbind()
    sizes = {"rows": BLOCK_ROWS, "group": GROUP, "num_warps": num_warps}
    _look[(experts * tall,)](nibbles, scales, is_signed, is_unfit, wide, **sizes)
    _pack[experts * tall, wide](
        nibbles, scales, is_signed, blocks, wide, data_bytes=DATA_BYTES, block_bytes=BLOCK_BYTES,
        **sizes,
    )  # fmt: skip
    return is_signed, is_unfit
