"""Logits as integers of the same order, and their weights, for the kernels of `sample`."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def flip(bits):
    """Bits of float32 to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(logit):
    logit = tl.where(logit == 0.0, 0.0, logit)  # -0.0 equals 0.0
    return flip(logit.to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    return flip(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logit, best, factor, factor_rest):
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
def factors_of(temperature):
    """Of `weight_of`, from a temperature in float64."""
    # log2(e) as a literal: a constant would make the quotient one in Triton's interpreter. Beyond
    # 1e30 no other token weighs anything, and float32 would overflow.
    exact = tl.minimum(1.4426950408889634 / temperature, 1e30)
    factor = exact.to(tl.float32)
    return factor, (exact - factor.to(tl.float64)).to(tl.float32)


@triton.jit
def least_likely(best, temperature, min_p, low, high):
    """The smallest key in [low, high) whose weight is at least `min_p`; that of high - 1 is."""
    high -= 1
    while high > low:
        middle = low + (high - low) // 2
        distance = value_of(middle).to(tl.float64) - best.to(tl.float64)
        is_likely = tl.exp(distance / temperature) >= min_p
        high = tl.where(is_likely, middle, high)
        low = tl.where(is_likely, low, middle + 1)
    return high
