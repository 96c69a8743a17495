"""Pieces of llguidance's Lark: what a rule of it may have on its right."""

import json
import re
from collections.abc import Mapping

from llguidance import regex_to_lark

from gateway.grammar.schema_rewrite import rewritten

# Whether only one of several schemas fits is not looked at.
SCHEMA_OPTIONS = {"whitespace_flexible": False, "coerce_one_of": True}
ASCII_CLASSES = "dws"  # \d, \w and \s know ASCII only
ANY_TEXT = "/(?s:.*)/"
Marks = Mapping[str, int]


def literal(text: str, marks: Mapping[str, int], *, by_character: bool = False) -> str:
    """`text` as Lark spells it; "" for no text."""
    spelled: list[str] = []
    for piece in cut_at_marks(text, marks):
        if piece in marks:
            spelled.append(f"<[{marks[piece]}]>")
        else:
            spelled += map(_quoted, piece if by_character else [piece])
    return " ".join(spelled)


def cut_at_marks(text: str, marks: Mapping[str, int]) -> list[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if marks else [text]
    return [piece for piece in pieces if piece]


def _quoted(text: str) -> str:
    return json.dumps(text).replace("\x7f", r"\u007f")


def regex_term(text: str) -> str:
    """An output matches as a whole: anchors around it say nothing."""
    bare = text.removeprefix("^")
    num_backslashes = len(bare.removesuffix("$")) - len(bare.removesuffix("$").rstrip("\\"))
    if num_backslashes % 2 == 0:
        bare = bare.removesuffix("$")
    elif not bare.endswith("$"):
        raise ValueError("a backslash is at its end")
    return f"/{regex_to_lark(bare, ASCII_CLASSES)}/" if bare else '""'


def json_term(text: str) -> str:
    """Of a schema; any object without a text."""
    schema = json.loads(text) if text else {"type": "object"}
    if schema is False:
        raise ValueError("no output can match it")
    plain = {} if schema is True else rewritten(schema)
    return f"%json {json.dumps({**plain, 'x-guidance': SCHEMA_OPTIONS})}"


def text_without(texts: list[str]) -> str:
    found = "|".join(exactly(text) for text in texts if text)
    return f"/(?s:.*)/ & ~/(?s:.*)({found})(?s:.*)/" if found else ANY_TEXT


def until(trigger: str, others: list[str], marks: Marks) -> str:
    """The lexeme of any text up to `trigger`, with none of `others` before; and the mark that it
    ends with, if it does."""
    *before, last = cut_at_marks(trigger, marks)
    if last in marks:
        text = text_without(others)
        return f"/(?s:.*){exactly(''.join(before))}/ & {text}"
    found = "|".join(map(exactly, dict.fromkeys([trigger, *others])))
    return f"/(?s:.*){exactly(trigger)}/ & ~/(?s:.*)({found})(?s:.+)/"


def mark_of(trigger: str, marks: Marks) -> str:
    """The one that it ends with; "" for none."""
    last = cut_at_marks(trigger, marks)[-1]
    return literal(last, marks) if last in marks else ""


def exactly(text: str) -> str:
    """As a regular expression."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
