"""Regular expressions of JSON schemas: read, bound to lengths, and written for the compiler.

They are searched for, not matched as a whole, as JSON Schema says. Lookaheads become intersections.
"""

import importlib
import math
import re
from collections.abc import Sequence
from typing import Any

from gateway.grammar.regular import (
    ALL,
    EMPTY,
    LAST,
    NOTHING,
    Alt,
    Cat,
    Chars,
    Node,
    Repeat,
    alt,
    both,
    cat,
    chars,
    negation,
    repeat,
)

WORDS = 4

_parser: Any = importlib.import_module("re._parser")

_DIGITS = ((48, 57),)
_WORD = (*_DIGITS, (65, 90), (95, 95), (97, 122))
_SPACES = ((9, 13), (32, 32), (160, 160), (0x2028, 0x2029), (0xFEFF, 0xFEFF))
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_CATEGORIES = {"DIGIT": _DIGITS, "WORD": _WORD, "SPACE": _SPACES}
# What JSON spells by an escape, and what no text has: left out of every class.
_NOT_SPELLED = ((0, 31), (34, 34), (92, 92), (127, 159), (0x2028, 0x2029), (0xD800, 0xDFFF))
_COUNTED = re.compile(r"\^\(\?=\.\{([0-9]{1,9}),([0-9]{0,9})\}(?:\\\.\?)?\$\)")
_NAMED_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])[A-Za-z0-9_]+>")


def length_ahead(pattern: str) -> tuple[str, int, float]:
    """`pattern` without a lookahead that counts all characters, and what it asks for."""
    found = _COUNTED.match(pattern)
    if not found:
        return pattern, 0, math.inf
    most = int(found[2]) if found[2] else math.inf
    return "^" + pattern[found.end() :], int(found[1]), most


def read_pattern(pattern: str) -> Node:
    """Texts in which it is found. Raises ValueError for what is not supported."""
    try:
        parsed = _parser.parse(_NAMED_GROUP.sub("(?:", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern: {error}") from error
    if parsed.state.flags & ~re.UNICODE:
        raise ValueError("pattern: flags are not supported")
    is_choice = len(parsed) == 1 and str(parsed[0][0]) == "BRANCH"
    branches = parsed[0][1][1] if is_choice else [parsed]
    return alt(*(_found(list(branch)) for branch in branches))


def _found(items: list[Any]) -> Node:
    if items and str(items[0][0]) == "AT" and str(items[0][1]) == "AT_BEGINNING":
        return _sequence(items, ALL, at_start=True)
    return cat(ALL, _sequence(items, ALL, at_start=False))


def _sequence(items: Sequence[Any], behind: Node, *, at_start: bool) -> Node:
    """`items`, then `behind`, which goes on to the end of the text."""
    for position in reversed(range(len(items))):
        is_first = at_start and all(
            str(name) in ("AT", "ASSERT", "ASSERT_NOT") for name, _ in items[:position]
        )
        behind = _item(str(items[position][0]), items[position][1], behind, at_start=is_first)
    return behind


def _item(name: str, value: Any, behind: Node, *, at_start: bool) -> Node:  # noqa: ANN401
    match name:
        case "AT" if str(value) == "AT_END":
            return both(EMPTY, behind)
        case "AT" if str(value) == "AT_BEGINNING" and at_start:
            return behind
        case "ASSERT" | "ASSERT_NOT" if value[0] > 0:
            ahead = _sequence(list(value[1]), ALL, at_start=at_start)
            return both(ahead if name == "ASSERT" else negation(ahead), behind)
        case "SUBPATTERN" if not value[1] and not value[2]:
            return _sequence(list(value[3]), behind, at_start=at_start)
        case "BRANCH" if any(map(_looks_around, value[1])):
            return alt(*(_sequence(list(one), behind, at_start=at_start) for one in value[1]))
        case "MAX_REPEAT" | "MIN_REPEAT" if _looks_around(value[2]) and tuple(value[:2]) == (0, 1):
            return alt(behind, _sequence(list(value[2]), behind, at_start=at_start))
        case _:
            return cat(_plain(name, value), behind)


def _looks_around(items: Any) -> bool:  # noqa: ANN401 - of the parser, as below
    return any(
        str(name) in ("AT", "ASSERT", "ASSERT_NOT")
        or any(map(_looks_around, _inner(str(name), value)))
        for name, value in items
    )


def _inner(name: str, value: Any) -> list[Any]:  # noqa: ANN401
    match name:
        case "SUBPATTERN":
            return [value[3]]
        case "BRANCH":
            return list(value[1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            return [value[2]]
        case _:
            return []


def _plain(name: str, value: Any) -> Node:  # noqa: ANN401
    """What says nothing about what is around it."""
    match name:
        case "LITERAL":
            return chars([(value, value)])
        case "NOT_LITERAL":
            return chars([(value, value)], negated=True)
        case "ANY":
            return chars(_LINE_ENDS, negated=True)
        case "IN":
            return _class(value)
        case "BRANCH":
            return alt(*(cat(*(_plain(str(n), v) for n, v in one)) for one in value[1]))
        case "SUBPATTERN" if not value[1] and not value[2]:
            return cat(*(_plain(str(n), v) for n, v in value[3]))
        case "MAX_REPEAT" | "MIN_REPEAT":
            most = math.inf if value[1] == _parser.MAXREPEAT else int(value[1])
            return repeat(cat(*(_plain(str(n), v) for n, v in value[2])), int(value[0]), most)
        case _:
            raise ValueError(f"pattern: {name.lower()} is not supported here")


def _class(items: Any) -> Chars:  # noqa: ANN401
    ranges: list[tuple[int, int]] = []
    negated = False
    for name, value in items:
        match str(name):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case _:
                _, is_not, kind = str(value).rpartition("NOT_")
                category = _CATEGORIES[(kind if is_not else str(value).rpartition("_")[2])]
                ranges.extend(chars(category, negated=bool(is_not)).ranges)
    return chars(ranges, negated=negated)


def spelled(node: Node) -> Node:
    """Without characters that JSON does not write as they are."""
    match node:
        case Chars(ranges):
            return chars([*chars(ranges, negated=True).ranges, *_NOT_SPELLED], negated=True)
        case Cat(parts):
            return cat(*map(spelled, parts))
        case Alt(parts):
            return alt(*map(spelled, parts))
        case Repeat(part, least, most):
            return repeat(spelled(part), least, most)
        case _:
            raise AssertionError(node)


def lengths(node: Node) -> tuple[int, float]:
    """The least and the most characters; of plain nodes."""
    match node:
        case Chars():
            return 1, 1
        case Cat(parts):
            every = list(map(lengths, parts))
            return sum(low for low, _ in every), sum(high for _, high in every)
        case Alt(parts):
            every = list(map(lengths, parts))
            return min(low for low, _ in every), max(high for _, high in every)
        case Repeat(part, least, most):
            low, high = lengths(part)
            return low * least, high * most if high else 0
        case _:
            raise AssertionError(node)


def fitted(node: Node, low: int, high: float) -> Node:
    """Those of its texts that have `low` to `high` characters, or most of them: where several parts
    may be long, each gets a share. NOTHING if there are none."""
    least, most = lengths(node)
    if low <= least and most <= high:
        return node
    if low > most or high < least:
        return NOTHING
    match node:
        case Alt(parts):
            return alt(*(fitted(part, low, high) for part in parts))
        case Repeat(part, fewest, many):
            return _fitted_repeat(part, fewest, many, low, high)
        case Cat(parts):
            return _fitted_parts(parts, low, high)
        case _:
            return NOTHING


def _fitted_repeat(part: Node, fewest: int, many: float, low: int, high: float) -> Node:
    least, most = lengths(part)
    if least == 0:
        part, fewest, least = fitted(part, 1, most), 0, 1
    fewest = max(fewest, math.ceil(low / least))
    if most > least and high < math.inf:
        # Long ones and many of them cannot both be: up to WORDS long ones, or as many as they are
        # long.
        share = max(math.isqrt(int(high)), high // WORDS)
        most = max(least, min(most, share, high // max(1, fewest)))
        part = fitted(part, least, most)
    many = min(many, high // most)
    if fewest > many:
        return NOTHING
    return repeat(part, fewest, many)


def _fitted_parts(parts: tuple[Node, ...], low: int, high: float) -> Node:
    """One way for each part that can make the text long enough by itself."""
    bounds = [lengths(part) for part in parts]
    missing = max(0, low - sum(least for least, _ in bounds))
    ways = []
    for longer, (least, most) in enumerate(bounds):
        if least + missing > most:
            continue
        floors = [one + missing * (i == longer) for i, (one, _) in enumerate(bounds)]
        most_of = _shares(floors, [one for _, one in bounds], high)
        ways.append(cat(*map(fitted, parts, floors, most_of)) if most_of else NOTHING)
        if not missing:
            break
    return alt(*ways)


def _shares(floors: list[int], wishes: list[float], high: float) -> list[float]:
    """The most that each part may have, `high` in all; those who want little get all of it. None
    where there is not enough for `floors`."""
    room = high - sum(floors)
    shares: list[float] = [0.0] * len(floors)
    if room < 0:
        return []
    order = sorted(range(len(floors)), key=lambda i: wishes[i] - floors[i])
    for num_left, i in zip(range(len(order), 0, -1), order, strict=True):
        extra = min(wishes[i] - floors[i], room if room == math.inf else room // num_left)
        shares[i] = floors[i] + extra
        room -= extra
    return shares


def write_pattern(node: Node) -> str:
    """For the compiler, which takes it for the whole text."""
    return f"^(?:{_written(node)})$"


def _written(node: Node) -> str:
    match node:
        case Chars(ranges):
            return "[" + "".join(
                _code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges
            ) + "]"  # fmt: skip
        case Cat(parts):
            return "".join(
                f"(?:{_written(part)})" if isinstance(part, Alt) else _written(part)
                for part in parts
            )
        case Alt(parts):
            return "|".join(map(_written, parts))
        case Repeat(part, least, most):
            inner = _written(part)
            inner = inner if isinstance(part, Chars) else f"(?:{inner})"
            return f"{inner}{{{least},{'' if most == math.inf else int(most)}}}"
        case _:
            raise AssertionError(node)


def _code(code_point: int) -> str:
    character = chr(code_point)
    if character.isascii():
        return character if character.isalnum() else f"\\u{code_point:04x}"
    assert code_point <= LAST
    return character
