"""First step of the Triton path of `sample`: each part of a row gives its best tokens.

A part writes its largest tokens, at most `capacity` of them and in order of tokens, and what is to
be known of the others: how many they are and what they weigh together.
"""

import triton
import triton.language as tl

from kernels.sampling.sample_order_triton import factors_of, key_of, value_of, weight_of

VALUE_TURNS = tl.constexpr(8)  # of halving by value; those after them halve the integers
TURNS = tl.constexpr(40)


@triton.jit
def _limit(logit, low, peak, num_real, capacity: tl.constexpr):
    """A logit that at most `capacity` tokens reach, and not many fewer; inf where too many are
    the best. Of more than `capacity` tokens between `low` and `peak`."""
    is_real = logit > float("-inf")
    high, held = peak, tl.sum((logit >= peak).to(tl.int32), 0)
    high = tl.where(held > capacity, float("inf"), high)
    scale = 1.0 / num_real.to(tl.float32)
    mean = tl.sum(tl.where(is_real, logit * scale, 0.0), 0)
    distance = tl.where(is_real, tl.abs(logit - mean) * scale, 0.0)
    # What an eleventh of normally distributed logits reach is the first guess. Few are below the
    # mean: what is held may be less than it could be, if they are not.
    middle = mean + 1.67 * tl.sum(distance, 0)
    middle = tl.where((middle > low) & (middle < high), middle, peak)
    low = tl.maximum(low, tl.minimum(mean, peak))
    turn = tl.zeros([], tl.int32)
    while (held < capacity - capacity // 4) & (turn < TURNS):
        reached = tl.sum((logit >= middle).to(tl.int32), 0)
        fits = reached <= capacity
        held = tl.where(fits, reached, held)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
        middle = low * 0.5 + high * 0.5
        turn += 1
        if turn > VALUE_TURNS:
            first, last = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
            middle = value_of(first + (last - first) // 2)
            turn = tl.where(last - first > 1, turn, TURNS)
    return high


@triton.jit(do_not_specialize_on_alignment=["temperatures", "least", "limits", "reals"])
def near(
    logits, temperatures, near_logits, near_tokens, peaks, peak_tokens, least, limits, sums, reals,
    num, part: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """A program a part. For rows of temperature 0 only the best token."""
    row = tl.program_id(1).to(tl.int64)
    entry = row * tl.num_programs(0) + tl.program_id(0)
    place = tl.program_id(0) * part + tl.arange(0, part)
    logit = tl.load(logits + row * num + place, mask=place < num, other=float("-inf"))
    is_real = logit > float("-inf")
    peak = tl.max(logit, 0)
    num_real = tl.sum(is_real.to(tl.int32), 0)
    tl.store(peaks + entry, peak)
    tl.store(peak_tokens + entry, tl.min(tl.where(logit == peak, place, num), 0))
    tl.store(reals + entry, num_real)
    low = tl.min(tl.where(is_real, logit, float("inf")), 0)
    tl.store(least + entry, low)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        factor, factor_rest = factors_of(temperature.to(tl.float64))
        best = tl.where(num_real > 0, peak, 0.0)
        weight = weight_of(tl.where(is_real, logit, best), best, factor, factor_rest)
        tl.store(sums + entry, tl.sum(tl.where(is_real, weight, 0.0), 0).to(tl.float64))
        limit = tl.zeros([], tl.float32) + float("-inf")
        if num_real > capacity:
            limit = _limit(logit, low, peak, num_real, capacity)
        tl.store(limits + entry, limit)
        is_near = is_real & (logit >= limit)
        goal = tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(near_logits + entry * capacity + goal, logit, mask=is_near)
        tl.store(near_tokens + entry * capacity + goal, place, mask=is_near)
        slot = tl.arange(0, capacity)
        nothing = tl.full([capacity], float("-inf"), tl.float32)
        is_free = slot >= tl.sum(is_near.to(tl.int32), 0)
        tl.store(near_logits + entry * capacity + slot, nothing, mask=is_free)
