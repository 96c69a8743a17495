"""Regular languages as expressions with intersection and complement.

Source: Brzozowski, Derivatives of regular expressions (1964).

    derivative by each class of characters -> automaton -> states taken out -> plain expression
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

LAST = 0x10FFFF
MAX_STATES = 400
MAX_NODES = 20_000
TOO_LARGE = "its patterns and formats together are too much"


class TooLarge(ValueError):
    """An automaton or an expression that nobody should wait for."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character. `ranges` are code points, both ends included, sorted and apart."""

    ranges: tuple[tuple[int, int], ...]

    def has(self, code_point: int) -> bool:
        return any(low <= code_point <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class Cat:
    parts: tuple["Node", ...]  # none: the empty text


@dataclass(frozen=True, slots=True)
class Alt:
    parts: frozenset["Node"]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Node"
    least: int
    most: float  # a whole number, or infinity


@dataclass(frozen=True, slots=True)
class Both:
    parts: frozenset["Node"]


@dataclass(frozen=True, slots=True)
class Not:
    part: "Node"


Node = Chars | Cat | Alt | Repeat | Both | Not
NOTHING, EMPTY = Chars(()), Cat(())
ANY = Chars(((0, LAST),))
ALL = Repeat(ANY, 0, math.inf)


def chars(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Chars:
    """In any order, overlapping or not."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    if not negated:
        return Chars(tuple(joined))
    edges = [-1, *(edge for low, high in joined for edge in (low, high)), LAST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return Chars(tuple((low + 1, high - 1) for low, high in gaps if low + 1 < high))


def literal(text: str) -> Node:
    return cat(*(Chars(((ord(one), ord(one)),)) for one in text))


def cat(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat.extend(part.parts if isinstance(part, Cat) else (part,))
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def alt(*parts: Node) -> Node:
    """Single characters become one class, so that equal languages are equal nodes more often."""
    flat = [one for part in parts for one in (part.parts if isinstance(part, Alt) else (part,))]
    ranges = [pair for one in flat if isinstance(one, Chars) for pair in one.ranges]
    kept: set[Node] = {one for one in flat if not isinstance(one, Chars)}
    if ranges:
        kept.add(chars(ranges))
    if ALL in kept:
        return ALL
    if len(kept) > 1:
        return Alt(frozenset(kept))
    return kept.pop() if kept else NOTHING


def repeat(part: Node, least: int = 0, most: float = math.inf) -> Node:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return NOTHING if least else EMPTY
    if (least, most) == (1, 1) or (part == ALL and least == 0):
        return part
    if isinstance(part, Repeat) and (part.least, part.most) == (0, math.inf):
        return part  # (x*)* and (x*){n,m}
    return Repeat(part, least, most)


def both(*parts: Node) -> Node:
    flat = {one for part in parts for one in (part.parts if isinstance(part, Both) else (part,))}
    flat.discard(ALL)
    if NOTHING in flat:
        return NOTHING
    if EMPTY in flat:
        return EMPTY if all(map(takes_empty, flat)) else NOTHING
    if len(flat) > 1:
        return Both(frozenset(flat))
    return flat.pop() if flat else ALL


def negation(part: Node) -> Node:
    if isinstance(part, Not):
        return part.part
    return ALL if part == NOTHING else NOTHING if part == ALL else Not(part)


@lru_cache(maxsize=50_000)
def takes_empty(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Alt(parts):
            return any(map(takes_empty, parts))
        case Repeat(part, least, _):
            return least == 0 or takes_empty(part)
        case Not(part):
            return not takes_empty(part)
        case Cat(parts) | Both(parts):
            return all(map(takes_empty, parts))


@lru_cache(maxsize=50_000)
def derivative(node: Node, code_point: int) -> Node:
    """What may follow the character."""
    match node:
        case Chars():
            return EMPTY if node.has(code_point) else NOTHING
        case Cat(()):
            return NOTHING
        case Cat(parts):
            first, rest = parts[0], cat(*parts[1:])
            ways = [cat(derivative(first, code_point), rest)]
            return alt(*ways, derivative(rest, code_point)) if takes_empty(first) else ways[0]
        case Alt(parts):
            return alt(*(derivative(part, code_point) for part in parts))
        case Repeat(part, least, most):
            fewer = repeat(part, max(0, least - 1), most - 1)
            return cat(derivative(part, code_point), fewer)
        case Both(parts):
            return both(*(derivative(part, code_point) for part in parts))
        case Not(part):
            return negation(derivative(part, code_point))


def plain(node: Node) -> Node:
    """The same language without Both and Not; NOTHING if it has no text. Raises TooLarge."""
    return _expression(_automaton(node)) if _is_extended(node) else node


def is_within(part: Node, whole: Node) -> bool:
    """Whether every text of `part` is one of `whole`. Raises TooLarge."""
    root = both(part, negation(whole))
    classes, seen, waiting = _classes(root), {root}, [root]
    while waiting:
        node = waiting.pop()
        if takes_empty(node):
            return False
        following = {derivative(node, one.ranges[0][0]) for one in classes} - seen
        seen |= following
        waiting.extend(following)
        if len(seen) > MAX_STATES:
            raise TooLarge(TOO_LARGE)
    return True


def _parts(node: Node) -> Iterable[Node]:
    match node:
        case Chars():
            return ()
        case Cat(parts) | Alt(parts) | Both(parts):
            return parts
        case Repeat(part, _, _) | Not(part):
            return (part,)


def _all(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(_parts(one))


def _is_extended(node: Node) -> bool:
    return any(isinstance(one, Both | Not) for one in _all(node))


def _classes(node: Node) -> list[Chars]:
    """Characters that no part of `node` tells apart, together all there are."""
    sets = list({one for one in _all(node) if isinstance(one, Chars)})
    starts = sorted({0, *(edge for one in sets for low, high in one.ranges
                          for edge in (low, high + 1) if edge <= LAST)})  # fmt: skip
    groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, above in zip(starts, [*starts[1:], LAST + 1], strict=True):
        groups.setdefault(tuple(one.has(low) for one in sets), []).append((low, above - 1))
    return [chars(ranges) for ranges in groups.values()]


Edges = dict[int, dict[int, Node]]  # by state: where to, and by what


def _automaton(root: Node) -> tuple[Edges, set[int]]:
    """Its edges from state 0 on, as few states as there can be, and the states that end."""
    classes = _classes(root)
    numbers: dict[Node, int] = {root: 0}
    nodes, targets = [root], list[list[int]]()
    while len(targets) < len(nodes):
        node = nodes[len(targets)]
        following = [derivative(node, one.ranges[0][0]) for one in classes]
        for one in following:
            if one not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise TooLarge(TOO_LARGE)
                numbers[one] = len(nodes)
                nodes.append(one)
        targets.append([numbers[one] for one in following])
    block = _blocks(targets, [takes_empty(node) for node in nodes])
    edges: Edges = {one: {} for one in block}
    for state, following_states in enumerate(targets):
        if block[state] != state:
            continue
        for label, target in zip(classes, following_states, strict=True):
            into = block[target]
            edges[state][into] = alt(edges[state].get(into, NOTHING), label)
    return edges, {block[number] for node, number in numbers.items() if takes_empty(node)}


def _blocks(targets: list[list[int]], ends: list[bool]) -> list[int]:
    """For each state the first one that takes the same texts (Moore's refinement)."""
    kinds = [int(end) for end in ends]
    while True:
        seen: dict[tuple[int, ...], int] = {}
        finer = [
            seen.setdefault((kinds[state], *(kinds[one] for one in following)), len(seen))
            for state, following in enumerate(targets)
        ]
        if len(set(finer)) == len(set(kinds)):
            first: dict[int, int] = {}
            return [first.setdefault(kind, state) for state, kind in enumerate(finer)]
        kinds = finer


def _expression(automaton: tuple[Edges, set[int]]) -> Node:
    """By taking out one state after the other, those with the fewest ways through them first."""
    edges, ends = automaton
    start, end = -1, -2
    into: Edges = {state: {} for state in (*edges, start, end)}  # `edges` the other way round
    edges[start], edges[end] = {0: EMPTY}, {}
    for state in ends:
        edges[state][end] = EMPTY
    for state, following in edges.items():
        for target, label in following.items():
            into[target][state] = label
    while len(edges) > 2:
        state = min((one for one in edges if one >= 0),
                    key=lambda one: (len(edges[one]) * len(into[one]), one))  # fmt: skip
        following, before = edges.pop(state), into.pop(state)
        loop = repeat(following.pop(state, NOTHING))
        before.pop(state, None)
        for target in following:
            del into[target][state]
        for source, label in before.items():
            del edges[source][state]
            for target, further in following.items():
                way = alt(edges[source].get(target, NOTHING), cat(label, loop, further))
                edges[source][target] = into[target][source] = way
                if sum(1 for _ in _all(way)) > MAX_NODES:
                    raise TooLarge(TOO_LARGE)
    return edges[start].get(end, NOTHING)
