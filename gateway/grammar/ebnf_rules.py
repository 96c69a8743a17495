"""Grammars that users write as EBNF (GBNF), as rules of llguidance's Lark.

    root ::= "a" [bc]* digits | (item ","){2,4}     # names, literals, classes, any of + * ? {m,n}

The library cuts an output into lexemes, the longest first, where EBNF knows characters only. So
each character is a lexeme of its own; but a grammar that does not call itself is one lexeme, which
is much quicker.
"""

import re
from collections.abc import Collection, Mapping

from gateway.grammar.lark_terms import literal

MAX_RULES = 1000  # the library's stack has room for no chain of more than some
_PIECE = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)|(?P<rule>(?P<called>[A-Za-z_][\w.-]*)\s*::=)
    |(?P<name>[A-Za-z_][\w.-]*)|"(?P<text>(?:\\.|[^"\\\n])*)"|\[(?P<not>\^?)(?P<set>(?:\\.|[^]\\])*)]
    |(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?})|(?P<sign>[()|*+?])|(?P<any>\.)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[ux]\{([0-9a-fA-F]+)}|(.))|(.)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def rules_of_ebnf(ebnf: str, start: str, marks: Mapping[str, int]) -> str:
    """Lines of which the last one defines `start`. Texts of `marks` are those tokens.
    Raises ValueError saying what is wrong."""
    rules = _rules(ebnf)
    names = {name: f"{start}_{number}" for number, name in enumerate(rules)}
    texts = [_text(one["text"]) for pieces in rules.values() for one in pieces if one["text"]]
    is_lexeme = not _calls_itself(rules) and not any(m in text for text in texts for m in marks)
    if is_lexeme:
        names = {name: new.upper() for name, new in names.items()}
    lines = [
        f"{names[name]}: {' '.join(_spelled(one, names, marks, is_lexeme) for one in pieces)}"
        for name, pieces in rules.items()
    ]
    return "\n".join([*lines, f"{start}: {names['root']}"])


def _rules(ebnf: str) -> dict[str, list[re.Match[str]]]:
    rules: dict[str, list[re.Match[str]]] = {}
    pieces: list[re.Match[str]] | None = None
    for piece in _PIECE.finditer(ebnf):
        if piece["blank"]:
            continue
        if name := piece["called"]:
            if name in rules:
                raise ValueError(f"rule {name} is there twice")
            pieces = rules[name] = []
        elif piece["other"] or pieces is None:
            line = ebnf.count("\n", 0, piece.start()) + 1
            raise ValueError(f"line {line}: {piece[0][:40]!r} was not expected")
        else:
            pieces.append(piece)
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    if len(rules) > MAX_RULES:
        raise ValueError(f"at most {MAX_RULES} rules are possible")
    for name, pieces in rules.items():
        _check_rule(name, pieces, rules)
    return rules


def _check_rule(name: str, pieces: list[re.Match[str]], known: Collection[str]) -> None:
    depth, before = 0, "|"
    for piece in pieces:
        if piece["name"] and piece["name"] not in known:
            raise ValueError(f"rule {name}: there is no rule named {piece['name'][:64]}")
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        if depth < 0 or ((piece["repeat"] or piece[0] in "*+?") and before in "(|"):
            raise ValueError(f"rule {name}: {piece[0]!r} was not expected")
        before = piece[0]
    if depth:
        raise ValueError(f"rule {name}: a parenthesis is not closed")


def _calls_itself(rules: Mapping[str, list[re.Match[str]]]) -> bool:
    """Whether any rule does, through whatever others: without it all are done in some order."""
    calls = {name: {one["name"] for one in pieces} - {None} for name, pieces in rules.items()}
    done: set[str] = set()
    while ready := [name for name in calls if calls[name] <= done and name not in done]:
        done.update(ready)
    return len(done) < len(calls)


def _spelled(
    piece: re.Match[str], names: Mapping[str, str], marks: Mapping[str, int], is_lexeme: bool
) -> str:
    if piece["name"]:
        return names[piece["name"]]
    if piece["text"] is not None:
        text = literal(_text(piece["text"]), marks, by_character=not is_lexeme)
        return f"({text})" if text else '""'
    if piece["set"] is not None:
        ends = "".join(_in_class(one) for one in _CHARACTER.finditer(piece["set"]))
        if not ends:
            raise ValueError(f"{piece[0]} holds no character")
        return f"/[{piece['not']}{ends}]/"
    return "/(?s:.)/" if piece["any"] else piece[0]


def _text(escaped: str) -> str:
    return "".join(_character(one) for one in _CHARACTER.finditer(escaped))


def _character(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3] or found[4]
    if digits:
        return chr(int(digits, 16))
    return found[6] or _ESCAPES.get(found[5], found[5])


def _in_class(found: re.Match[str]) -> str:
    """A dash without a backslash makes a range."""
    return "-" if found[0] == "-" else f"\\x{{{ord(_character(found)):x}}}"
