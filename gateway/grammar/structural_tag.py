"""Structural tags, which say what is free text and what is not, as rules of Lark."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.grammar.ebnf_rules import rules_of_ebnf
from gateway.grammar.lark_terms import (
    Marks,
    cut_at_marks,
    json_term,
    literal,
    mark_of,
    regex_term,
    text_without,
    until,
)

Format = Mapping[str, Any]


def rules_of_tag(tag: Any, start: str, marks: Marks) -> str:  # noqa: ANN401 - any JSON
    """Lines that define `start`. Texts of `marks` are those tokens.
    Raises ValueError for what is no structural tag, or one that is not supported."""
    writer = _Writer(start, marks)
    try:
        root = writer.term(_of_today(tag)["format"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"it is no structural tag: {error} is missing or wrong") from error
    return "\n".join([*writer.lines, f"{start}: {root}"])


def _of_today(tag: Any) -> Any:  # noqa: ANN401 - any JSON
    """The older form (`structures` and `triggers`), which engines took first, in that of today."""
    if "structures" not in tag:
        return tag
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    return {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


class _Writer:
    """`term` gives what stands for a format in a rule; `lines` are the rules that it needs."""

    def __init__(self, start: str, marks: Marks) -> None:
        self.lines: list[str] = []
        self._start, self._marks = start, marks
        self._kinds: dict[str, Callable[[Format], str]] = {
            "const_string": lambda one: self._text(one["value"]),
            "json_schema": lambda one: json_term(json.dumps(one["json_schema"])),
            "any_text": lambda one: self._free(one.get("excludes", [])),
            "regex": lambda one: regex_term(one["pattern"]),
            "grammar": self._grammar,
            "sequence": lambda one: " ".join(map(self.term, one["elements"])),
            "or": lambda one: " | ".join(map(self.term, one["elements"])),
            "tag": lambda one: self._tag(one, 0),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def term(self, one: Format) -> str:
        if one["type"] not in self._kinds:
            raise ValueError(f"structural tags of type {one['type']!r:.64} are not supported")
        return f"({self._kinds[one['type']](one)})"

    def _name(self) -> str:
        return f"{self._start}_{len(self.lines)}"

    def _lexeme(self, expression: str) -> str:
        name = self._name().upper()
        self.lines.append(f"{name}: {expression}")
        return name

    def _text(self, text: str) -> str:
        return literal(text, self._marks) or '""'

    def _plain(self, texts: Sequence[str]) -> list[str]:
        """Those without a mark: others are in no text anyway."""
        return [one for one in texts if self._marks.keys().isdisjoint(self._cut(one))]

    def _cut(self, text: str) -> list[str]:
        return cut_at_marks(text, self._marks)

    def _free(self, excluded: Sequence[str]) -> str:
        return self._lexeme(text_without(self._plain(excluded)))

    def _until(self, trigger: str, others: Sequence[str]) -> str:
        lexeme = self._lexeme(until(trigger, self._plain(others), self._marks))
        return f"{lexeme} {mark_of(trigger, self._marks)}"

    def _grammar(self, one: Format) -> str:
        name = self._name()
        self.lines.append(rules_of_ebnf(one["grammar"], name, self._marks))
        return name

    def _tag(self, tag: Format, num_begun: int) -> str:
        """Without so many characters of its begin."""
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        content = tag["content"]
        if content["type"] == "any_text" and all(ends):
            closed = [self._until(end, [*ends, *content.get("excludes", [])]) for end in ends]
        else:
            closed = [f"{self.term(content)} {self._text(end)}" for end in ends]
        return f"{self._text(tag['begin'][num_begun:])} ({' | '.join(closed)})"

    def _triggered(self, one: Format) -> str:
        stops = [*one["triggers"], *one.get("excludes", [])]
        groups = []
        for trigger in one["triggers"]:
            tags = [tag for tag in one["tags"] if tag["begin"].startswith(trigger)]
            rests = " | ".join(self._tag(tag, len(trigger)) for tag in tags)
            groups.append(f"{self._until(trigger, stops)} ({rests})")
        group, free = f"({' | '.join(groups)})", self._free(stops)
        if one.get("stop_after_first"):
            return group if one.get("at_least_one") else f"{group} | {free}"
        return f"{group}{'+' if one.get('at_least_one') else '*'} {free}"

    def _separated(self, one: Format) -> str:
        tags = f"({' | '.join(map(self.term, one['tags']))})"
        more = "" if one.get("stop_after_first") else f" ({self._text(one['separator'])} {tags})*"
        return f"{tags}{more}" if one.get("at_least_one") else f"({tags}{more})?"
