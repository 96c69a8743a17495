"""Between the two steps of the Triton path of `sample`: rows whose token is not among the
best of their parts, though nothing is cut.

Sums above PROBES limits say between which two of them the token is; then each part gathers what it
has there. Rows that are decided cost these kernels a look at a number.
"""

import triton
import triton.language as tl

from kernels.sampling.sample_order_triton import factors_of, weight_of

PROBES = tl.constexpr(32)


@triton.jit
def row_facts(temperatures, uniforms, peaks, part_sums, row, num_parts, padded_parts: tl.constexpr):
    """The best logit, the sum of all weights (float64), and the sum at which the token is."""
    part = tl.arange(0, padded_parts)
    entry, is_part = row * num_parts + part, part < num_parts
    peak = tl.load(peaks + entry, mask=is_part, other=float("-inf"))
    best = tl.max(peak, 0)
    temperature = tl.load(temperatures + row).to(tl.float64)
    sums = tl.load(part_sums + entry, mask=is_part, other=0.0)
    peak = tl.where(peak > float("-inf"), peak, best).to(tl.float64)
    total = tl.sum(sums * tl.exp((peak - best.to(tl.float64)) / temperature), 0)
    return best, total, total * tl.load(uniforms + row).to(tl.float64)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["temperatures", "least", "limits"],
)
def tail_sums(
    logits, temperatures, pending, peaks, least, limits, tail_limits, sums, counts, num_rows, num,
    part: tl.constexpr, padded_parts: tl.constexpr,
):  # fmt: skip
    """tail_limits [rows, PROBES], rising to the limit of what is gathered; of each part sums and
    counts at or above them, [rows, parts, PROBES]."""
    num_parts = tl.num_programs(0)
    for number in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        row = number + tl.zeros([], tl.int64)
        if tl.load(pending + row) != 0:
            entry = row * num_parts + tl.arange(0, padded_parts)
            is_part = tl.arange(0, padded_parts) < num_parts
            best = tl.max(tl.load(peaks + entry, mask=is_part, other=float("-inf")), 0)
            low = tl.min(tl.load(least + entry, mask=is_part, other=float("inf")), 0)
            high = tl.max(tl.load(limits + entry, mask=is_part, other=float("-inf")), 0)
            place = tl.program_id(0) * part + tl.arange(0, part)
            logit = tl.load(logits + row * num + place, mask=place < num, other=float("-inf"))
            factor, factor_rest = factors_of(tl.load(temperatures + row).to(tl.float64))
            is_real = logit > float("-inf")
            weight = weight_of(tl.where(is_real, logit, best), best, factor, factor_rest)
            goal = (row * num_parts + tl.program_id(0)) * PROBES
            for probe in range(0, PROBES):
                share = probe / (PROBES - 1.0)
                limit = tl.where(probe == 0, low, low * (1.0 - share) + high * share)
                limit = tl.where(probe == PROBES - 1, high, limit)
                is_above = is_real & (logit >= limit)
                tl.store(sums + goal + probe, tl.sum(tl.where(is_above, weight, 0.0), 0))
                tl.store(counts + goal + probe, tl.sum(is_above.to(tl.int32), 0))
                if tl.program_id(0) == 0:
                    tl.store(tail_limits + row * PROBES + probe, limit)


@triton.jit
def tail_interval(tail_limits, sums, counts, goal, row, num_parts, padded_parts: tl.constexpr):
    """The limits between which a sum is reached; sum (float64) and count at or above the upper,
    count at or above the lower."""
    probe = tl.arange(0, PROBES)
    part = tl.arange(0, padded_parts)
    entry = (row * num_parts + part[:, None]) * PROBES + probe[None, :]
    is_part = (part < num_parts)[:, None]
    each = tl.sum(tl.load(sums + entry, mask=is_part, other=0.0).to(tl.float64), 0)
    nums = tl.sum(tl.load(counts + entry, mask=is_part, other=0), 0)
    # Never the last: what is at or above it does not reach the sum.
    at = tl.minimum(tl.maximum(tl.sum((each > goal).to(tl.int32), 0) - 1, 0), PROBES - 2)
    limit = tl.load(tail_limits + row * PROBES + probe)
    low = tl.max(tl.where(probe == at, limit, float("-inf")), 0)
    high = tl.max(tl.where(probe == at + 1, limit, float("-inf")), 0)
    top_sum = tl.sum(tl.where(probe == at + 1, each, 0.0), 0)
    top_count = tl.sum(tl.where(probe == at + 1, nums, 0), 0)
    return low, high, top_sum, top_count, tl.sum(tl.where(probe == at, nums, 0), 0)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperatures", "found"]
)
def tail_near(
    logits, temperatures, uniforms, pending, peaks, part_sums, tail_limits, sums, counts,
    near_logits, near_tokens, found, num_rows, num,
    part: tl.constexpr, capacity: tl.constexpr, padded_parts: tl.constexpr,
):  # fmt: skip
    """Gathers what lies in the interval, and says how many there are in each part."""
    num_parts = tl.num_programs(0)
    for number in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        row = number + tl.zeros([], tl.int64)
        if tl.load(pending + row) != 0:
            _, _, goal = row_facts(
                temperatures, uniforms, peaks, part_sums, row, num_parts, padded_parts
            )
            low, high, _, _, _ = tail_interval(
                tail_limits, sums, counts, goal, row, num_parts, padded_parts
            )
            entry = row * num_parts + tl.program_id(0)
            place = tl.program_id(0) * part + tl.arange(0, part)
            logit = tl.load(logits + row * num + place, mask=place < num, other=float("-inf"))
            is_near = (logit >= low) & (logit < high)
            num_near = tl.sum(is_near.to(tl.int32), 0)
            tl.store(found + entry, num_near)
            slot = tl.cumsum(is_near.to(tl.int32), 0) - 1
            fits = is_near & (slot < capacity)
            tl.store(near_logits + entry * capacity + slot, logit, mask=fits)
            tl.store(near_tokens + entry * capacity + slot, place, mask=fits)
            slot = tl.arange(0, capacity)
            nothing = tl.full([capacity], float("-inf"), tl.float32)
            tl.store(near_logits + entry * capacity + slot, nothing, mask=slot >= num_near)
