"""Triton path of `kernels.sampling.sample`: a program a part of a row gathers its best tokens
(`sample_near_triton`), then a program a row decides among them, once more for rows whose token is
not there (`sample_tail_triton`).

Every step asks where in the descending order a count or a sum of weights is reached. Logits are
compared as integers of the same order, and an interval of these is narrowed: each pass takes counts
and sums above PROBES of them, until one token or one value of several equal ones is left.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sampling.sample_near_triton import near
from kernels.sampling.sample_order_triton import (
    factors_of,
    key_of,
    least_likely,
    value_of,
    weight_of,
)
from kernels.sampling.sample_tail_triton import PROBES as TAIL_PROBES
from kernels.sampling.sample_tail_triton import row_facts, tail_interval, tail_near, tail_sums

PART = 4096  # tokens of a program that gathers, and how many it may gather
CAPACITY = 512
BLOCK = 1024  # tokens of a step of a program that decides
NUM_WARPS = 16
TAIL_ROWS = 8  # programs of a part that look for rows which are not decided
PROBES = tl.constexpr(4)
# Of narrowing by value, which suits logits; those after them narrow by integers, which ends.
VALUE_TURNS = tl.constexpr(9)


@triton.jit
def _weights(source, num, start, best, factor, factor_rest, block: tl.constexpr):
    place = start + tl.arange(0, block)
    logit = tl.load(source + place, mask=place < num, other=float("-inf"))
    is_real = logit > float("-inf")
    weight = weight_of(tl.where(is_real, logit, best), best, factor, factor_rest)
    # No key is as small.
    return tl.where(is_real, key_of(logit), -0x80000000), tl.where(is_real, weight, 0.0)


@triton.jit
def _above(
    source, num, keys, weights, key, best, factor, factor_rest, block: tl.constexpr,
    tiled: tl.constexpr,
):  # fmt: skip
    """Sum of weights (float64) and number of the tokens at or above a key: those in registers if
    `tiled`, else those of `source`."""
    if tiled:
        is_above = keys.to(tl.int64) >= key
        sums = tl.where(is_above, weights, 0.0)
        nums = is_above.to(tl.int32)
    else:
        sums = tl.zeros([block], tl.float32)
        nums = tl.zeros([block], tl.int32)
        for start in range(0, num, block):
            each, weight = _weights(source, num, start, best, factor, factor_rest, block)
            is_above = each.to(tl.int64) >= key
            sums += tl.where(is_above, weight, 0.0)
            nums += is_above.to(tl.int32)
    return tl.sum(sums, 0).to(tl.float64), tl.sum(nums, 0)


@triton.jit
def _above_each(
    source, num, keys, weights, probes, best, factor, factor_rest, block: tl.constexpr,
    tiled: tl.constexpr,
):  # fmt: skip
    """The same of [PROBES] keys."""
    if tiled:
        step = tl.arange(0, PROBES)
        total = tl.zeros([PROBES], tl.float32)
        count = tl.zeros([PROBES], tl.int32)
        for each in tl.static_range(PROBES):
            is_above = keys >= tl.min(tl.where(step == each, probes, 0x7FFFFFFF), 0)
            total = tl.where(step == each, tl.sum(tl.where(is_above, weights, 0.0), 0), total)
            count = tl.where(step == each, tl.sum(is_above.to(tl.int32), 0), count)
    else:
        sums = tl.zeros([PROBES, block], tl.float32)
        nums = tl.zeros([PROBES, block], tl.int32)
        for start in range(0, num, block):
            each_key, weight = _weights(source, num, start, best, factor, factor_rest, block)
            is_above = each_key[None, :] >= probes[:, None]
            sums += tl.where(is_above, weight[None, :], 0.0)
            nums += is_above.to(tl.int32)
        total, count = tl.sum(sums, 1), tl.sum(nums, 1)
    return total.to(tl.float64), count


@triton.jit
def _reach(
    source, num, keys, weights, low, high, top_sum, top_count, bottom_count, goal, best, factor,
    factor_rest, block: tl.constexpr, tiled: tl.constexpr, counts: tl.constexpr,
    strictly: tl.constexpr, adds: tl.constexpr = False,
):  # fmt: skip
    """The largest key at or above which the count (or the sum) is at least (or above) `goal`, the
    sum and the count above it, the count of its equals. It lies in [low, high); at or above `high`
    are `top_count` tokens, which weigh `top_sum` and which, if it `adds`, are not among those
    looked at; at or above `low` are `bottom_count`."""
    base_sum, base_count = top_sum, top_count
    step = tl.arange(0, PROBES) + 1
    turn = tl.zeros([], tl.int32)
    while (high - low > 1) & (bottom_count - top_count > 1):
        value, last = value_of(low).to(tl.float64), value_of(high - 1).to(tl.float64)
        by_value = key_of((value + (last - value) / (PROBES + 1) * step).to(tl.float32))
        by_key = low + (high - low) * step // (PROBES + 1)
        probe = tl.where(turn < VALUE_TURNS, by_value.to(tl.int64), by_key)
        probe = tl.minimum(tl.maximum(probe, low + 1), high - 1)
        sums, nums = _above_each(
            source, num, keys, weights, probe.to(tl.int32), best, factor, factor_rest, block, tiled
        )
        if adds:
            sums += base_sum
            nums += base_count
        if counts:
            reaches = nums >= goal
        elif strictly:
            reaches = sums > goal
        else:
            reaches = sums >= goal
        # Of falling sums and counts: the last that reaches the goal, the first that does not.
        bottom_count = tl.minimum(bottom_count, tl.min(tl.where(reaches, nums, 0x7FFFFFFF), 0))
        top_count = tl.maximum(top_count, tl.max(tl.where(reaches, 0, nums), 0))
        top_sum = tl.maximum(top_sum, tl.max(tl.where(reaches, 0.0, sums), 0))
        high = tl.minimum(high, tl.min(tl.where(reaches, high, probe), 0))
        low = tl.maximum(low, tl.max(tl.where(reaches, probe, low), 0))
        turn += 1
    # One token, or several of one value.
    if tiled:
        found = tl.where(keys.to(tl.int64) < high, keys, -0x80000000)
    else:
        found = tl.full([block], -0x80000000, tl.int32)
        for start in range(0, num, block):
            place = start + tl.arange(0, block)
            key = key_of(tl.load(source + place, mask=place < num, other=float("-inf")))
            found = tl.maximum(found, tl.where(key.to(tl.int64) < high, key, -0x80000000))
    return tl.max(found, 0).to(tl.int64), top_sum, top_count, bottom_count - top_count


@triton.jit
def _nth(source, length, tokens, key, nth, block: tl.constexpr, tiled: tl.constexpr):
    """The token of the `nth` logit of that key."""
    seen = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int64)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        logit = tl.load(source + place, mask=place < length, other=float("-inf"))
        is_equal = (key_of(logit).to(tl.int64) == key) & (logit > float("-inf"))
        index = seen + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        found = is_equal & (index == nth)
        name = place
        if tiled:
            name = tl.load(tokens + place, mask=found, other=0)
        token += tl.sum(tl.where(found, name, 0), 0)
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return token


@triton.jit
def _draw(
    source, length, keys, weights, tokens, low, high, top_sum, top_count, bottom_count, goal,
    num_low, best, factor, factor_rest, block: tl.constexpr, tiled: tl.constexpr,
    adds: tl.constexpr,
):  # fmt: skip
    """The first token whose predecessors and itself weigh more than `goal`; arguments as of
    `_reach`, of the tokens of key `low` the first `num_low`."""
    key, above, _, ties = _reach(
        source, length, keys, weights, low, high, top_sum, top_count, bottom_count, goal, best,
        factor, factor_rest, block, tiled, False, True, adds,
    )  # fmt: skip
    weight = weight_of(value_of(key), best, factor, factor_rest).to(tl.float64)
    nth = tl.floor((goal - above) / tl.maximum(weight, 1e-300))
    num = tl.where(key == low, tl.minimum(num_low, ties), ties)
    nth = tl.minimum(tl.maximum(nth, 0.0), 2.0e9).to(tl.int32)
    nth = tl.minimum(nth, num - 1)
    if tiled and ties == 1:
        slot = tl.arange(0, keys.shape[0])
        token = tl.sum(tl.load(tokens + slot, mask=keys.to(tl.int64) == key, other=0), 0)
        token = token.to(tl.int64)
    else:
        token = _nth(source, length, tokens, key, nth, block, tiled)
    return token


@triton.jit
def _cut_and_draw(
    source, length, keys, weights, tokens, all_low, low, high, num_at, total, top_k, cuts_k, share,
    least_key, uniform, best, factor, factor_rest, block: tl.constexpr, tiled: tl.constexpr,
):  # fmt: skip
    """The token, if all that is asked for is among those looked at, of which `num_at` are at or
    above `low`; the weights of all tokens, from `all_low` on, are `total`."""
    none, no_tokens = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    # What stays: all keys above `cut`, and the first `num_cut` tokens of that key; `num_at` are at
    # or above it. Nothing is cut: the sum is that of all tokens, also when not all are looked at.
    cut, num_cut, kept = low, tl.zeros([], tl.int32) + 0x7FFFFFFF, total
    if cuts_k:
        cut, above, count, ties = _reach(
            source, length, keys, weights, low, high, none, no_tokens, num_at, top_k, best, factor,
            factor_rest, block, tiled, True, False,
        )  # fmt: skip
        num_cut, num_at = top_k - count, count + ties
        kept = above + num_cut * weight_of(value_of(cut), best, factor, factor_rest).to(tl.float64)
    if share < 1.0:
        goal = share * kept
        key, above, count, ties = _reach(
            source, length, keys, weights, cut, high, none, no_tokens, num_at, goal, best, factor,
            factor_rest, block, tiled, False, False,
        )  # fmt: skip
        weight = weight_of(value_of(key), best, factor, factor_rest).to(tl.float64)
        reached = tl.ceil((goal - above) / tl.maximum(weight, 1e-300))
        reached = tl.minimum(tl.maximum(reached, 1.0), 2.0e9).to(tl.int32)
        reached = tl.minimum(reached, tl.where(key > cut, ties, tl.minimum(num_cut, ties)))
        cut, num_cut, num_at, kept = key, reached, count + ties, above + reached * weight
    # Not those below `low`, either, which are in the sum of all.
    is_first_cut = (least_key > all_low) & (share >= 1.0) & (not cuts_k)
    if (least_key > cut) | is_first_cut:
        cut, num_cut = least_key, tl.zeros([], tl.int32) + 0x7FFFFFFF
        kept, num_at = _above(
            source, length, keys, weights, cut, best, factor, factor_rest, block, tiled
        )
    return _draw(
        source, length, keys, weights, tokens, cut, high, none, no_tokens, num_at, uniform * kept,
        num_cut, best, factor, factor_rest, block, tiled, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures", "top_ks", "top_ps", "min_ps", "least", "limits", "reals",
    ]
)  # fmt: skip
def _decide(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, near_logits, near_tokens, peaks,
    peak_tokens, least, limits, part_sums, reals, pending, out, num, num_parts,
    padded_parts: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, padded_parts)
    entry, is_part = row * num_parts + part, part < num_parts
    peak = tl.load(peaks + entry, mask=is_part, other=float("-inf"))
    best = tl.max(peak, 0)
    first = tl.load(peak_tokens + entry, mask=is_part & (peak == best), other=num)
    given = tl.load(temperatures + row)
    num_real = tl.sum(tl.load(reals + entry, mask=is_part, other=0), 0)
    if (num_real == 0) | (given <= 0.0):
        # Nothing may be drawn: the first token.
        tl.store(pending + row, 0)
        tl.store(out + row, tl.where(num_real > 0, tl.min(first, 0), 0).to(tl.int64))
        return
    temperature = given.to(tl.float64)
    share = tl.load(top_ps + row).to(tl.float64)
    share = tl.where(share > 0.0, share, 1.0)
    min_p = tl.load(min_ps + row).to(tl.float64)
    uniform = tl.load(uniforms + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    cuts_k = (top_k > 0) & (top_k < num_real)
    factor, factor_rest = factors_of(temperature)
    _, total, _ = row_facts(temperatures, uniforms, peaks, part_sums, row, num_parts, padded_parts)
    worst = tl.min(tl.load(least + entry, mask=is_part, other=float("inf")), 0)
    low, high = key_of(worst).to(tl.int64), key_of(best).to(tl.int64) + 1
    least_key = low
    if min_p > 0.0:
        least_key = least_likely(best, temperature, min_p, low, high)

    # Do those gathered decide alone?
    limit = tl.max(tl.load(limits + entry, mask=is_part, other=float("-inf")), 0)
    near_low = tl.maximum(key_of(limit).to(tl.int64), low)
    gathered, length = near_logits + row * num_parts * capacity, num_parts * capacity
    tokens = near_tokens + row * num_parts * capacity
    keys, weights = _weights(gathered, length, 0, best, factor, factor_rest, tile)
    near_sum, num_near = _above(
        gathered, length, keys, weights, near_low, best, factor, factor_rest, block, True
    )
    is_uncut = (share >= 1.0) & (min_p <= 0.0) & (not cuts_k)
    is_enough = (
        ((share < 1.0) & (near_sum >= share * total))
        | (least_key >= near_low)
        | (is_uncut & (uniform * total < near_sum))
    )
    is_held = (cuts_k & (top_k <= num_near)) | (num_near == num_real) | (is_enough & (not cuts_k))
    is_held = is_held & (limit < float("inf"))
    waits = is_uncut & (limit < float("inf")) & (not is_held)
    tl.store(pending + row, waits.to(tl.int32))
    if is_held:
        token = _cut_and_draw(
            gathered, length, keys, weights, tokens, low, near_low, high, num_near, total, top_k,
            cuts_k, share, least_key, uniform, best, factor, factor_rest, block, True,
        )  # fmt: skip
        tl.store(out + row, token)
    elif not waits:
        token = _cut_and_draw(
            logits + row * num, num, keys, weights, tokens, low, low, high, num_real, total, top_k,
            cuts_k, share, least_key, uniform, best, factor, factor_rest, block, False,
        )  # fmt: skip
        tl.store(out + row, token)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "found"])
def _decide_tail(
    logits, temperatures, uniforms, pending, near_logits, near_tokens, peaks, part_sums,
    tail_limits, tail_sums, tail_counts, found, out, num, num_parts,
    padded_parts: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) == 0:
        return
    best, _, goal = row_facts(
        temperatures, uniforms, peaks, part_sums, row, num_parts, padded_parts
    )
    lowest, highest, top_sum, top_count, bottom_count = tail_interval(
        tail_limits, tail_sums, tail_counts, goal, row, num_parts, padded_parts
    )
    low, high = key_of(lowest).to(tl.int64), key_of(highest).to(tl.int64)
    factor, factor_rest = factors_of(tl.load(temperatures + row).to(tl.float64))
    part = tl.arange(0, padded_parts)
    most = tl.max(tl.load(found + row * num_parts + part, mask=part < num_parts, other=0), 0)
    tokens = near_tokens + row * num_parts * capacity
    every = tl.zeros([], tl.int32) + 0x7FFFFFFF
    gathered, length = near_logits + row * num_parts * capacity, num_parts * capacity
    keys, weights = _weights(gathered, length, 0, best, factor, factor_rest, tile)
    if most <= capacity:
        token = _draw(
            gathered, length, keys, weights, tokens, low, high, top_sum, top_count, bottom_count,
            goal, every, best, factor, factor_rest, block, True, True,
        )  # fmt: skip
        tl.store(out + row, token)
    else:
        token = _draw(
            logits + row * num, num, keys, weights, tokens, low, high, top_sum, top_count,
            bottom_count, goal, every, best, factor, factor_rest, block, False, False,
        )  # fmt: skip
        tl.store(out + row, token)


class SampleShape(NamedTuple):
    """Tokens of a part and of those how many may be gathered, tokens of a step of deciding: powers
    of two; and the warps of either."""

    part: int = PART
    capacity: int = CAPACITY
    block: int = BLOCK
    part_warps: int = 8
    warps: int = NUM_WARPS


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    shape: SampleShape = SampleShape(),  # noqa: B008 - immutable
) -> torch.Tensor:
    """`shape`: other ones for tests and to measure."""
    num_rows, num = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    part, capacity, block, part_warps, warps = shape
    num_parts = triton.cdiv(num, part)
    near_logits = logits.new_empty(num_rows, num_parts, capacity)
    near_tokens = torch.empty_like(near_logits, dtype=torch.int32)
    peaks, least, limits = logits.new_empty(3, num_rows, num_parts)
    peak_tokens, reals, found = torch.empty_like(peaks.expand(3, -1, -1), dtype=torch.int32)
    sums = torch.empty_like(peaks, dtype=torch.float64)
    tail_limits = logits.new_empty(num_rows, TAIL_PROBES.value)
    tail = logits.new_empty(num_rows, num_parts, TAIL_PROBES.value)
    tail_counts = torch.empty_like(tail, dtype=torch.int32)
    pending = torch.empty_like(found[:, 0])
    logits = logits.contiguous()
    knobs = [each.contiguous() for each in (temperature, top_k, top_p, min_p, uniform)]
    given = (logits, knobs[0])
    gathered = (near_logits, near_tokens, peaks, peak_tokens, least, limits, sums, reals)
    sizes = {"part": part, "num_warps": part_warps}
    rows = {"padded_parts": triton.next_power_of_2(num_parts)}
    tile = triton.next_power_of_2(num_parts * capacity)
    decides = {**rows, "tile": tile, "block": block, "capacity": capacity, "num_warps": warps}
    near[num_parts, num_rows](*given, *gathered, num, capacity=capacity, **sizes)
    _decide[(num_rows,)](logits, *knobs, *gathered, pending, out, num, num_parts, **decides)
    tail_programs = (num_parts, min(num_rows, TAIL_ROWS))
    tail_sums[tail_programs](
        *given, pending, peaks, least, limits, tail_limits, tail, tail_counts, num_rows, num,
        **rows, **sizes,
    )  # fmt: skip
    tail_near[tail_programs](
        *given, knobs[4], pending, peaks, sums, tail_limits, tail, tail_counts, near_logits,
        near_tokens, found, num_rows, num, capacity=capacity, **rows, **sizes,
    )  # fmt: skip
    _decide_tail[(num_rows,)](
        *given, knobs[4], pending, near_logits, near_tokens, peaks, sums, tail_limits, tail,
        tail_counts, found, out, num, num_parts, **decides,
    )  # fmt: skip
    return out
