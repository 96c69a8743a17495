"""Strings of JSON schemas in words that llguidance keeps to: formats and lookaheads as patterns.

Formats are not all that their RFCs allow, but nothing else: what they leave out is what readers of
such values refuse, as leap seconds, the 30th of February, and hosts without a dot.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
)
# Short ones: beside a pattern and lengths their states multiply.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,10}}"
_NAME = r"[A-Za-z0-9_+-]{1,20}"
_IN_PATH = r"[A-Za-z0-9_.~!$&'()*+,;=:@-]"
_HEX = "[0-9a-fA-F]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_NAME}(?:\.{_NAME})?@{_HOST}",
    "hostname": _HOST,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_IN_PATH}*)*"
        rf"(?:\?(?:{_IN_PATH}|[/?])*)?(?:#(?:{_IN_PATH}|[/?])*)?"
    ),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
# The library's own will do. Any other format is a note, as JSON Schema has it.
_KNOWN = ("duration", "ipv4", "ipv6")
# zod writes this beside the format of that name, which it takes all of.
_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
# Of pydantic's decimals: digits before and behind the point are never more than those in all.
_DIGITS_IN_ALL = re.compile(r"\(\?=\[\\d\.]\{1,\d+}0\*\$\)(?=\\d\{0,\d+}\\\.\\d\{0,\d+}0\*\)\$$)")

_TOKEN = re.compile(r"\\[pPx]\{[^}]*}|\\u[0-9a-fA-F]{4}|\\.|\[(?:\\.|[^]\\])*]|.", re.DOTALL)
_OPPOSITE = {"d": "D", "w": "W", "s": "S", "D": "d", "W": "w", "S": "s"}
_AHEAD = re.compile(r"\^?\(\?([=!])")
NOT_SUPPORTED = "look-ahead is supported at the begin of a pattern, of simple expressions only"


def plain_string(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, which may be one of other types too, with its format and pattern as plain
    patterns. A format that contradicts the pattern is a note. Raises ValueError for patterns that
    are not supported."""
    new = {name: value for name, value in schema.items() if name not in ("format", "pattern")}
    name, pattern = schema.get("format"), schema.get("pattern", "")
    patterns = plain_patterns("" if (name, pattern) == ("duration", _DURATION) else pattern)
    joined: list[dict[str, Any]] = [{"pattern": one} for one in patterns]
    wanted = {"pattern": f"^(?:{FORMATS[name]})$"} if name in FORMATS else {"format": name}
    is_known = name in FORMATS or name in _KNOWN
    if is_known and (not joined or _is_possible([*joined, wanted])):
        joined.append(wanted)
    if not joined:
        return new
    rest = [*new.get("allOf", ()), *joined[1:]]
    return new | joined[0] | ({"allOf": rest} if rest else {})


def _is_possible(schemas: list[dict[str, Any]]) -> bool:
    grammar = f"start: %json {json.dumps({'type': 'string', 'allOf': schemas})}"
    return "nsatisfiable" not in LLMatcher.validate_grammar(grammar, None)


def plain_patterns(pattern: str) -> list[str]:
    """Patterns without lookaheads at the begin: what they all are found in is what `pattern` is
    found in, or less than that."""
    pattern, found = _DIGITS_IN_ALL.sub("", pattern), []
    while ahead := _AHEAD.match(pattern):
        if len(_branches(pattern)) > 1:
            raise ValueError(NOT_SUPPORTED)
        begin, end = ahead.end(), _group_end(pattern, ahead.end())
        inner = [one.removeprefix("^") for one in _branches(pattern[begin:end])]
        if ahead[1] == "=":
            found.append("|".join(f"^{one}" for one in inner))
        else:
            found += [without for one in inner for without in _not_ahead(one)]
        pattern = "^" + pattern[end + 1 :]
    return [one for one in (*found, pattern) if one not in ("", "^")]


def _tokens(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Where each is, and within how many groups; parentheses themselves are outside of theirs."""
    depth = 0
    for token in _TOKEN.finditer(pattern):
        depth -= token[0] == ")"
        yield token.start(), token[0], depth
        depth += token[0] == "("


def _group_end(pattern: str, begin: int) -> int:
    for position, token, depth in _tokens(pattern[begin:]):
        if token == ")" and depth < 0:
            return begin + position
    raise ValueError("pattern: a group is not closed")


def _branches(pattern: str) -> list[str]:
    cuts = [at for at, token, depth in _tokens(pattern) if token == "|" and not depth]
    starts, ends = [0, *(at + 1 for at in cuts)], [*cuts, len(pattern)]
    return [pattern[start:end] for start, end in zip(starts, ends, strict=True)]


def _not_ahead(inner: str) -> list[str]:
    """Patterns of texts that do not begin with what `inner` stands for."""
    if group := re.fullmatch(r"\((?:\?:)?([^()]*)\)(\$?)", inner):
        return [one for branch in group[1].split("|") for one in _not_ahead(branch + group[2])]
    anywhere = inner.startswith(".*")
    *atoms, last = [token for _, token, _ in _tokens(inner.removeprefix(".*"))] or [""]
    if anywhere and not atoms:  # a character that is nowhere
        return [f"^{_other_than(last)}*$"]
    if not anywhere and last == "$" and len(atoms) == 2 and atoms[1] in "*+":
        other = _other_than(atoms[0])
        return [other if atoms[1] == "*" else f"^$|{other}"]
    if last != "$":
        atoms.append(last)
    if anywhere:
        raise ValueError(NOT_SUPPORTED)
    ways = [f"{''.join(atoms[:i])}(?:$|{_other_than(one)})" for i, one in enumerate(atoms)]
    if last == "$":
        ways.append("".join(atoms) + r"[\s\S]")
    return [f"^(?:{'|'.join(ways)})"]


def _other_than(atom: str) -> str:
    """Any other character than this one, or than those of a class. Raises ValueError."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    if atom.startswith("["):
        return f"[^{atom[1:]}"
    if atom.startswith("\\") and atom[1:] in _OPPOSITE:
        return f"\\{_OPPOSITE[atom[1:]]}"
    if not atom or atom in "()|*+?{}^$." or atom in (r"\b", r"\B"):
        raise ValueError(NOT_SUPPORTED)
    return f"[^{atom}]"
