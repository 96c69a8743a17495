"""Multiples of a number between two others, as they are written in JSON: with all the decimal
places that the number has, without an exponent, and of at most 15 digits."""

import math
from collections.abc import Collection
from fractions import Fraction

from gateway.grammar.pattern_language import fitted
from gateway.grammar.regular import (
    ALL,
    EMPTY,
    NOTHING,
    Node,
    alt,
    both,
    cat,
    chars,
    literal,
    plain,
    repeat,
)

MOST_DIGITS = 15
MOST_ENDINGS = 1000


def multiples(
    step: float, low: float, high: float, *, excluded: Collection[float | None] = ()
) -> Node:
    """`low` and `high` may be infinite, and are no values if they are `excluded`.

    Raises ValueError where a few last digits do not say whether a number is a multiple, as of 3."""
    exact = Fraction(str(step))
    places = next((n for n in range(MOST_DIGITS) if (exact * 10**n).denominator == 1), MOST_DIGITS)
    unit = int(exact * 10**places)
    tail = next((n for n in range(MOST_DIGITS) if 10**n % max(unit, 1) == 0), None)
    if not unit or tail is None or 10**tail // unit > MOST_ENDINGS:
        raise ValueError(f"multipleOf {step} is supported for integers in narrow bounds only")
    least, most = (
        bound if math.isinf(bound)
        else sign * _first_whole(sign * Fraction(str(bound)) * 10**places, bound in excluded)
        for sign, bound in ((1, low), (-1, high))
    )  # fmt: skip
    endings = [str(n) for n in range(0, 10**tail, unit)]
    multiple = alt(
        *(cat(ALL, _spelled(end.zfill(tail), places)) for end in endings),
        *(_spelled(end.zfill(places + 1), places) for end in endings),
    ) if tail else ALL  # fmt: skip
    positive = _between(max(0, least), most, places)
    negative = cat(literal("-"), _between(max(1, -most), -least, places))
    found = fitted(plain(both(multiple, alt(positive, negative))), 1, MOST_DIGITS)
    if found == NOTHING:
        raise ValueError("no multiple of multipleOf is within the bounds")
    return found


def _first_whole(bound: Fraction, is_excluded: bool) -> int:
    return math.floor(bound) + 1 if is_excluded else math.ceil(bound)


def _spelled(digits: str, places: int) -> Node:
    """With the point, if it is within them."""
    if not places or len(digits) <= places:
        return literal(digits)
    return literal(f"{digits[:-places]}.{digits[-places:]}")


def _between(low: float, high: float, places: int) -> Node:
    """Whole numbers, of at least `places` + 1 digits, with the point."""
    if low > high:
        return NOTHING
    first = str(low).zfill(places + 1)
    nines = 10 ** len(first) - 1
    if high <= nines:
        return _of_width(first, str(high).zfill(len(first)), places)
    ways = [_of_width(first, str(nines), places)]
    num_between = (math.inf if high == math.inf else len(str(high))) - len(first) - 1
    if num_between:
        before = len(first) - places
        front = cat(_digit("1", "9"), repeat(_digit("0", "9"), before, before + num_between - 1))
        ways.append(cat(front, _of_width("0" * places, "9" * places, places)))
    if high < math.inf:
        ways.append(_of_width(str(10 ** (len(str(high)) - 1)), str(high), places))
    return alt(*ways)


def _of_width(low: str, high: str, places: int) -> Node:
    """Digits from `low` to `high`, with a point before the last `places`."""
    if not low:
        return EMPTY
    point = literal(".") if len(low) == places and places else EMPTY
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return cat(point, _digit("0", "9"), _of_width(low[1:], high[1:], places))
    if low[0] == high[0]:
        return cat(point, literal(low[0]), _of_width(low[1:], high[1:], places))
    ways = [cat(literal(low[0]), _of_width(low[1:], "9" * rest, places)),
            cat(literal(high[0]), _of_width("0" * rest, high[1:], places))]  # fmt: skip
    if int(high[0]) - int(low[0]) > 1:
        between = _digit(str(int(low[0]) + 1), str(int(high[0]) - 1))
        ways.append(cat(between, _of_width("0" * rest, "9" * rest, places)))
    return cat(point, alt(*ways))


def _digit(low: str, high: str) -> Node:
    return chars([(ord(low), ord(high))])
