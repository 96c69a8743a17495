"""Triton path of `kernels.sample`: a program a row.

Every step is a question of where in the descending order a count or a sum of weights is reached.
Logits are compared as integers of the same order (their bits), so the answer is found by
narrowing an interval of integers: each pass takes counts and sums above three probes, until one
token or one value of several equal tokens is left.

Passes over a whole vocabulary are few: one for the maximum, one for the sums, and one that collects
the tokens near the top, which decide nearly all rows. The others are decided among all tokens.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tokens of a step; as many may be collected
NUM_WARPS = 16
LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _flip(bits):
    """Bits of float32 to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(logit):
    logit = tl.where(logit == 0.0, 0.0, logit)  # -0.0 equals 0.0
    return _flip(logit.to(tl.int32, bitcast=True))


@triton.jit
def _value(key):
    return _flip(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(logit, best, factor, factor_rest):
    """2 ** ((logit - best) * (factor + factor_rest)) with the errors of both operations."""
    distance = logit - best
    part = distance - logit
    distance_rest = (logit - (distance - part)) - (best + part)
    power = distance * factor
    rest = tl.fma(distance, factor, -power) + distance * factor_rest + distance_rest * factor
    is_small = power > -200.0
    weight = tl.exp2(tl.where(is_small, power, -200.0))
    return tl.where(is_small, weight + weight * (rest * LN2), 0.0)


@triton.jit
def _above(
    source, num, first, second, third, best, factor, factor_rest, block: tl.constexpr,
):  # fmt: skip
    """Sums of weights (float64) and counts of the tokens at or above each of three keys."""
    sum_1 = tl.zeros([block], tl.float32)
    sum_2 = tl.zeros([block], tl.float32)
    sum_3 = tl.zeros([block], tl.float32)
    count_1 = tl.zeros([block], tl.int32)
    count_2 = tl.zeros([block], tl.int32)
    count_3 = tl.zeros([block], tl.int32)
    first, second, third = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
    for start in range(0, num, block):
        place = start + tl.arange(0, block)
        logit = tl.load(source + place, mask=place < num, other=float("-inf"))
        key = _key(logit)
        is_real = logit > float("-inf")
        weight = _weight(tl.where(is_real, logit, best), best, factor, factor_rest)
        above = is_real & (key >= first)
        sum_1 += tl.where(above, weight, 0.0)
        count_1 += above.to(tl.int32)
        above = is_real & (key >= second)
        sum_2 += tl.where(above, weight, 0.0)
        count_2 += above.to(tl.int32)
        above = is_real & (key >= third)
        sum_3 += tl.where(above, weight, 0.0)
        count_3 += above.to(tl.int32)
    return (
        tl.sum(sum_1.to(tl.float64), 0), tl.sum(sum_2.to(tl.float64), 0),
        tl.sum(sum_3.to(tl.float64), 0), tl.sum(count_1, 0), tl.sum(count_2, 0),
        tl.sum(count_3, 0),
    )  # fmt: skip


@triton.jit
def _reach(
    source, num, low, high, goal, best, factor, factor_rest, block: tl.constexpr,
    counts: tl.constexpr, strictly: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which the count (or the sum) is at least (or above) `goal`, the
    sum and the count above it, the count of its equals. It lies in [low, high)."""
    top_sum = tl.zeros([], tl.float64)
    top_count = tl.zeros([], tl.int32)
    none = tl.zeros([], tl.int64) + 0x7FFFFFFF
    _, _, _, bottom_count, _, _ = _above(
        source, num, low, none, none, best, factor, factor_rest, block
    )
    turn = tl.zeros([], tl.int32)
    while (high - low > 1) & (bottom_count - top_count > 1):
        width = high - low
        value, span = _value(low).to(tl.float64), _value(high - 1).to(tl.float64)
        span = (span - value) * 0.25
        # By turns equal parts of the numbers, which suits logits, and of the integers, which ends.
        by_value = turn % 2 == 0
        probe_1 = tl.where(by_value, _key((value + span).to(tl.float32)), low + width // 4)
        probe_2 = tl.where(by_value, _key((value + 2 * span).to(tl.float32)), low + width // 2)
        probe_3 = tl.where(by_value, _key((value + 3 * span).to(tl.float32)), low + 3 * width // 4)
        probe_1 = tl.minimum(tl.maximum(probe_1, low + 1), high - 1)
        probe_2 = tl.minimum(tl.maximum(probe_2, probe_1), high - 1)
        probe_3 = tl.minimum(tl.maximum(probe_3, probe_2), high - 1)
        sum_1, sum_2, sum_3, count_1, count_2, count_3 = _above(
            source, num, probe_1, probe_2, probe_3, best, factor, factor_rest, block
        )
        if counts:
            is_1, is_2, is_3 = count_1 >= goal, count_2 >= goal, count_3 >= goal
        elif strictly:
            is_1, is_2, is_3 = sum_1 > goal, sum_2 > goal, sum_3 > goal
        else:
            is_1, is_2, is_3 = sum_1 >= goal, sum_2 >= goal, sum_3 >= goal
        bottom_count = tl.where(is_1, count_1, bottom_count)
        bottom_count = tl.where(is_2, count_2, bottom_count)
        bottom_count = tl.where(is_3, count_3, bottom_count)
        top_sum = tl.where(is_3, top_sum, sum_3)
        top_sum = tl.where(is_2, top_sum, sum_2)
        top_sum = tl.where(is_1, top_sum, sum_1)
        top_count = tl.where(is_3, top_count, count_3)
        top_count = tl.where(is_2, top_count, count_2)
        top_count = tl.where(is_1, top_count, count_1)
        new_low = tl.where(is_1, probe_1, low)
        new_low = tl.where(is_2, probe_2, new_low)
        new_low = tl.where(is_3, probe_3, new_low)
        high = tl.where(is_3, high, probe_3)
        high = tl.where(is_2, high, probe_2)
        high = tl.where(is_1, high, probe_1)
        low = new_low
        turn += 1
    # One token, or several of one value.
    found = low.to(tl.int32)
    for start in range(0, num, block):
        place = start + tl.arange(0, block)
        logit = tl.load(source + place, mask=place < num, other=float("-inf"))
        key = _key(logit)
        inside = (key >= low.to(tl.int32)) & (key.to(tl.int64) < high)
        found = tl.maximum(found, tl.max(tl.where(inside, key, -0x80000000), 0))
    return found.to(tl.int64), top_sum, top_count, bottom_count - top_count


@triton.jit
def _least_likely(best, temperature, min_p, low, high):
    """The smallest key in [low, high) whose weight is at least `min_p`; that of high - 1 is."""
    high -= 1
    while high > low:
        middle = low + (high - low) // 2
        distance = _value(middle).to(tl.float64) - best.to(tl.float64)
        is_likely = tl.exp(distance / temperature) >= min_p
        high = tl.where(is_likely, middle, high)
        low = tl.where(is_likely, low, middle + 1)
    return high


@triton.jit
def _sums(logits, num, best, factor, factor_rest, block: tl.constexpr):
    """Sum of all weights, and how many logits lie within 1, 2, 4, 7, 11 and 16 of the best."""
    total = tl.zeros([block], tl.float32)
    num_1 = tl.zeros([block], tl.int32)
    num_2 = tl.zeros([block], tl.int32)
    num_4 = tl.zeros([block], tl.int32)
    num_7 = tl.zeros([block], tl.int32)
    num_11 = tl.zeros([block], tl.int32)
    num_16 = tl.zeros([block], tl.int32)
    for start in range(0, num, block):
        place = start + tl.arange(0, block)
        logit = tl.load(logits + place, mask=place < num, other=float("-inf"))
        is_real = logit > float("-inf")
        weight = _weight(tl.where(is_real, logit, best), best, factor, factor_rest)
        total += tl.where(is_real, weight, 0.0)
        num_1 += (logit >= best - 1.0).to(tl.int32)
        num_2 += (logit >= best - 2.0).to(tl.int32)
        num_4 += (logit >= best - 4.0).to(tl.int32)
        num_7 += (logit >= best - 7.0).to(tl.int32)
        num_11 += (logit >= best - 11.0).to(tl.int32)
        num_16 += (logit >= best - 16.0).to(tl.int32)
    return (
        tl.sum(total.to(tl.float64), 0), tl.sum(num_1, 0), tl.sum(num_2, 0), tl.sum(num_4, 0),
        tl.sum(num_7, 0), tl.sum(num_11, 0), tl.sum(num_16, 0),
    )  # fmt: skip


@triton.jit
def _collect(logits, num, lowest, near, near_token, block: tl.constexpr):
    """Writes the logits of at least `lowest` and their tokens, in order of tokens."""
    written = tl.zeros([], tl.int32)
    for start in range(0, num, block):
        place = start + tl.arange(0, block)
        logit = tl.load(logits + place, mask=place < num, other=float("-inf"))
        is_near = logit >= lowest
        goal = written + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(near + goal, logit, mask=is_near)
        tl.store(near_token + goal, place, mask=is_near)
        written += tl.sum(is_near.to(tl.int32), 0)
    # All threads' stores come before the loads that follow.
    tl.debug_barrier()


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, near_logits, near_tokens, out, num,
    block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    whole = logits + row * num
    near, near_token = near_logits + row * capacity, near_tokens + row * capacity
    given = tl.load(temperatures + row)
    is_random = given > 0.0
    temperature = tl.where(is_random, given, 1.0).to(tl.float64)
    share = tl.load(top_ps + row).to(tl.float64)
    share = tl.where(share > 0.0, share, 1.0)
    # The best tokens alone, and the first of them, is what temperature 0 means.
    min_p = tl.where(is_random, tl.load(min_ps + row), 1.0).to(tl.float64)
    uniform = tl.where(is_random, tl.load(uniforms + row).to(tl.float64), 0.0)

    most = tl.full([block], float("-inf"), tl.float32)
    least = tl.full([block], float("inf"), tl.float32)
    reals = tl.zeros([block], tl.int32)
    for start in range(0, num, block):
        place = start + tl.arange(0, block)
        logit = tl.load(whole + place, mask=place < num, other=float("-inf"))
        is_real = logit > float("-inf")
        most = tl.maximum(most, logit)
        least = tl.minimum(least, tl.where(is_real, logit, float("inf")))
        reals += is_real.to(tl.int32)
    best, worst, num_real = tl.max(most, 0), tl.min(least, 0), tl.sum(reals, 0)
    # Nothing may be drawn: the first token.
    best, worst = tl.where(num_real > 0, best, 0.0), tl.where(num_real > 0, worst, 0.0)
    top_k = tl.load(top_ks + row)
    cuts_k = (top_k > 0) & (top_k < num_real)
    # Beyond it no other token weighs anything, and float32 would overflow.
    exact = tl.minimum(LOG2_E / temperature, 1e30)
    factor = exact.to(tl.float32)
    factor_rest = (exact - factor.to(tl.float64)).to(tl.float32)

    total, num_1, num_2, num_4, num_7, num_11, num_16 = _sums(
        whole, num, best, factor, factor_rest, block
    )
    distance = tl.where(num_1 <= capacity, 1.0, 0.0)
    num_near = tl.where(num_1 <= capacity, num_1, 0)
    distance, num_near = (
        tl.where(num_2 <= capacity, 2.0, distance),
        tl.where(num_2 <= capacity, num_2, num_near),
    )
    distance, num_near = (
        tl.where(num_4 <= capacity, 4.0, distance),
        tl.where(num_4 <= capacity, num_4, num_near),
    )
    distance, num_near = (
        tl.where(num_7 <= capacity, 7.0, distance),
        tl.where(num_7 <= capacity, num_7, num_near),
    )
    distance, num_near = (
        tl.where(num_11 <= capacity, 11.0, distance),
        tl.where(num_11 <= capacity, num_11, num_near),
    )
    distance, num_near = (
        tl.where(num_16 <= capacity, 16.0, distance),
        tl.where(num_16 <= capacity, num_16, num_near),
    )
    lowest = best - distance
    low, high = _key(worst).to(tl.int64), _key(best).to(tl.int64) + 1
    least_key = low
    if min_p > 0.0:
        least_key = _least_likely(best, temperature, min_p, low, high)

    # Do those near the top decide alone? Then they are all that is looked at from here on.
    source, length, is_near = whole, num, num_near < 0
    if num_near > 0:
        _collect(whole, num, lowest, near, near_token, block)
        near_low = _key(lowest).to(tl.int64)
        near_sum, _, _, _, _, _ = _above(
            near, num_near, near_low, high, high, best, factor, factor_rest, block
        )
        is_uncut = (top_k <= 0) | (top_k >= num_real)
        is_held = (cuts_k & (top_k <= num_near)) | (
            is_uncut
            & (
                ((share < 1.0) & (near_sum >= share * total))
                | (least_key >= near_low)
                | ((share >= 1.0) & (min_p <= 0.0) & (uniform * total < near_sum))
            )
        )
        if is_held:
            source, length, is_near, low = near, num_near, num_near > 0, near_low

    # What stays: all keys above `cut`, and the first `num_cut` tokens of that key.
    cut, num_cut = low, tl.zeros([], tl.int32) + 0x7FFFFFFF
    if cuts_k:
        cut, above, count, _ = _reach(
            source, length, low, high, top_k, best, factor, factor_rest, block, True, False
        )
        num_cut = top_k - count
        above, _, _, _, _, _ = _above(
            source, length, cut + 1, cut + 1, cut + 1, best, factor, factor_rest, block
        )
        total = above + num_cut * _weight(_value(cut), best, factor, factor_rest).to(tl.float64)
    if share < 1.0:
        goal = share * total
        key, above, _, _ = _reach(
            source, length, cut, high, goal, best, factor, factor_rest, block, False, False
        )
        weight = _weight(_value(key), best, factor, factor_rest).to(tl.float64)
        part = tl.ceil((goal - above) / tl.maximum(weight, 1e-300))
        part = tl.minimum(tl.maximum(part, 1.0), 2.0e9).to(tl.int32)
        num_cut = tl.where(key > cut, part, tl.minimum(part, num_cut))
        cut = key
    num_cut = tl.where(least_key > cut, 0x7FFFFFFF, num_cut)
    cut = tl.maximum(least_key, cut)

    at_cut, above_cut, _, count_at, count_above, _ = _above(
        source, length, cut, cut + 1, cut + 1, best, factor, factor_rest, block
    )
    num_cut = tl.minimum(num_cut, count_at - count_above)
    kept = above_cut + num_cut * _weight(_value(cut), best, factor, factor_rest).to(tl.float64)
    # Nothing was cut: the sum is that of all tokens, also when not all were looked at.
    kept = tl.where(cuts_k | (share < 1.0) | (min_p > 0.0), kept, total)
    goal = uniform * kept
    key, above, _, ties = _reach(
        source, length, cut, high, goal, best, factor, factor_rest, block, False, True
    )
    weight = _weight(_value(key), best, factor, factor_rest).to(tl.float64)
    part = tl.floor((goal - above) / tl.maximum(weight, 1e-300))
    ties = tl.where(key == cut, num_cut, ties)
    nth = tl.minimum(tl.maximum(part, 0.0), 2.0e9).to(tl.int32)
    nth = tl.minimum(nth, ties - 1)

    seen = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int64)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        logit = tl.load(source + place, mask=place < length, other=float("-inf"))
        is_equal = (_key(logit).to(tl.int64) == key) & (logit > float("-inf"))
        index = seen + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        found = is_equal & (index == nth)
        name = place
        if is_near:
            name = tl.load(near_token + place, mask=place < length, other=0)
        token += tl.sum(tl.where(found, name, 0), 0)
        seen += tl.sum(is_equal.to(tl.int32), 0)
    tl.store(out + row, token)


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    block: int = BLOCK,
    capacity: int = BLOCK,
) -> torch.Tensor:
    """`block` and `capacity`, powers of two, as on a GPU or smaller for tests."""
    num_rows, num = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    near_logits = logits.new_empty(num_rows, capacity)
    near_tokens = torch.empty(num_rows, capacity, dtype=torch.int32, device=logits.device)
    knobs = (each.contiguous() for each in (temperature, top_k, top_p, min_p, uniform))
    _sample[(num_rows,)](
        logits.contiguous(), *knobs, near_logits, near_tokens, out, num,
        block=block, capacity=capacity, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
