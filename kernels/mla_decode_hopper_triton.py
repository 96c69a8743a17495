"""Path of `kernels.mla_decode_triton` on Hopper for what FlashMLA is made for: bfloat16, pages of
64 tokens, 512 + 64 wide, lines that fill blocks of 64. Parts and pieces are those of that file,
which also joins them; here the order of copies and products within a part is written out.

Two tiles of latents have room. The copy of the next one starts as soon as the values of the last
one are summed, in front of the scores of this one. Each of two warp groups computes the scores of
half of a tile's tokens and half of the 512 sums.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# NOTE: two names that changed between versions.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
LINES, TOKENS, VALUE_DIM, ROPE_DIM = 64, 64, 512, 64
WIDTH = VALUE_DIM + ROPE_DIM
TILE_BYTES = gl.constexpr(2 * TOKENS * WIDTH)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _follow():
    """As `kernels.dependent_launch_triton.follow`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fetch(latents, ropes, slot, barrier, k, k_rope, predicate):
    mbarrier.expect(barrier, TILE_BYTES, pred=predicate)
    _copy(latents, [slot, 0], barrier, k, pred=predicate)
    _copy(ropes, [slot, 512], barrier, k_rope, pred=predicate)


@gluon.jit
def _soften(scores, peak):
    """As `kernels.mla_decode_triton.soften`."""
    higher = gl.maximum(peak, gl.max(scores, axis=1))
    shift = gl.where(higher == float("-inf"), 0.0, higher)
    p = gl.exp2(scores - gl.expand_dims(shift, 1))
    return p.to(gl.bfloat16), gl.exp2(peak - shift), higher, gl.sum(p, axis=1)


@gluon.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "min_tiles"])
def _attend(
    query, query_rope, latents, ropes, block_table, kv_lengths, out, out_lse, piece, piece_lse,
    num_rows, num_queries, table_stride, num_parts, scale, min_tiles,
    num_heads: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    line_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])

    _follow()
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], query.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], query_rope.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], latents.layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], ropes.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(3):
        mbarrier.init(barriers.index(each), count=1)

    num_lines = num_queries * num_heads
    factor = gl.cast(scale, gl.float32)  # a float of Python may come as float64
    part = gl.program_id(1)
    first_line = gl.program_id(0) * 64
    line = gl.arange(0, 64, line_layout)
    index = gl.arange(0, rows, row_layout)
    lengths = gl.load(kv_lengths + index, mask=index < num_rows, other=0)
    ends = gl.associative_scan((lengths + 63) // 64, 0, _plus)
    num_tiles = gl.max(ends, axis=0)
    per_part = gl.maximum(gl.cdiv(num_tiles, num_parts), min_tiles)
    tile = part * per_part
    stop = gl.minimum(tile + per_part, num_tiles)
    fetched = 0  # tiles, before the one that is looked at
    pieces = 0

    while tile < stop:
        row = gl.sum((ends <= tile).to(gl.int32), axis=0)
        begin = gl.max(gl.where(index < row, ends, 0), axis=0)
        row_end = gl.sum(gl.where(index == row, ends, 0), axis=0)
        next_tile = gl.minimum(stop, row_end)
        length = gl.load(kv_lengths + row)
        table = block_table + row.to(gl.int64) * table_stride - begin
        # All products of the last piece are done in all warps: its tiles may be overwritten.
        _barrier()
        start = row * num_lines + first_line
        mbarrier.expect(barriers.index(2), TILE_BYTES)
        _copy(query, [start, 0], barriers.index(2), q)
        _copy(query_rope, [start, 512], barriers.index(2), q_rope)
        slot = gl.load(table + tile) * 64
        buffer = fetched % 2
        _fetch(
            latents, ropes, slot, barriers.index(buffer), k.index(buffer), k_rope.index(buffer),
            True,
        )  # fmt: skip
        next_slot = gl.load(table + tile + 1, mask=tile + 1 < next_tile, other=0) * 64

        last = gl.minimum((next_tile - begin) * 64, length)
        query_of = (first_line + line) // num_heads
        limit = gl.minimum(length - num_queries + query_of + 1, last)
        seen_by_all = gl.minimum(length - num_queries + 1, last)
        peak = gl.full([64], float("-inf"), gl.float32, line_layout)
        weight = gl.full([64], 0.0, gl.float32, line_layout)
        total = hopper.warpgroup_mma_init(gl.full([64, 512], 0.0, gl.float32, sum_layout))
        nothing = gl.full([64, 64], 0.0, gl.float32, score_layout)
        mbarrier.wait(barriers.index(2), pieces & 1)
        for number in range(tile, next_tile):
            buffer = fetched % 2
            other = 1 - buffer
            # NOTE: a wait that lets the scores go on makes the compiler serialise all products.
            total = hopper.warpgroup_mma_wait(0, deps=[total])
            _barrier()
            _fetch(
                latents, ropes, next_slot, barriers.index(other), k.index(other),
                k_rope.index(other), number + 1 < next_tile,
            )  # fmt: skip
            next_slot = gl.load(table + number + 2, mask=number + 2 < next_tile, other=0) * 64
            mbarrier.wait(barriers.index(buffer), (fetched // 2) & 1)
            tokens = k.index(buffer)
            scores = hopper.warpgroup_mma(
                q, tokens.permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            scores = hopper.warpgroup_mma(
                q_rope, k_rope.index(buffer).permute((1, 0)), scores, is_async=True
            )
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            scores = scores * factor
            position = (number - begin) * 64
            if position + 64 > seen_by_all:
                token = position + gl.arange(0, 64, gl.SliceLayout(0, score_layout))
                seen = gl.expand_dims(token, 0) < gl.expand_dims(limit, 1)
                scores = gl.where(seen, scores, float("-inf"))
            p, fading, peak, sums = _soften(scores, peak)
            weight = weight * fading + sums
            fading = gl.convert_layout(fading, gl.SliceLayout(1, sum_layout))
            total = total * gl.expand_dims(fading, 1)
            total = hopper.warpgroup_mma(
                gl.convert_layout(p, p_layout), tokens, total, is_async=True
            )
            fetched += 1
        total = hopper.warpgroup_mma_wait(0, deps=[total])
        pieces += 1

        is_empty = weight == 0.0
        divisor = gl.where(is_empty, 1.0, weight)
        lse = gl.where(is_empty, float("-inf"), gl.where(is_empty, 0.0, peak) + gl.log2(divisor))
        share = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, sum_layout))
        total = total * gl.expand_dims(share, 1)
        sum_line = gl.arange(0, 64, gl.SliceLayout(1, sum_layout))
        value = gl.arange(0, 512, gl.SliceLayout(0, sum_layout))
        pattern = gl.expand_dims(sum_line * 512, 1) + gl.expand_dims(value, 0)
        if (tile == begin) & (next_tile == row_end):
            done = row.to(gl.int64) * num_lines + first_line
            gl.store(out + done * 512 + pattern, total.to(gl.bfloat16))
            gl.store(out_lse + done + line, lse / LOG2_E)
        else:
            done = (row + part).to(gl.int64) * num_lines + first_line
            gl.store(piece + done * 512 + pattern, total)
            gl.store(piece_lse + done + line, lse)
        tile = next_tile


def launch(
    query: torch.Tensor,  # [B * Q, heads, 576] contiguous
    cache: torch.Tensor,  # [pages, 64, 576]
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
    piece: torch.Tensor,
    piece_lse: torch.Tensor,
    *,
    num_parts: int,
    scale: float,
    rows: int,
    min_tiles: int,
) -> None:
    num_tokens, num_heads, _ = query.shape
    num_rows = len(kv_lengths)
    num_queries = num_tokens // num_rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descriptors = [
        TensorDescriptor.from_tensor(each.view(-1, WIDTH), [64, width], layout)
        for each in (query, cache)
        for width in (VALUE_DIM, ROPE_DIM)
    ]
    _attend[num_queries * num_heads // LINES, num_parts](
        *descriptors, block_table, kv_lengths, out, out_lse, piece, piece_lse,
        num_rows, num_queries, block_table.stride(0), num_parts, scale,
        min_tiles, num_heads=num_heads, rows=rows, num_warps=8,
        launch_pdl=True,
    )  # fmt: skip
