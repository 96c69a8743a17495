"""What a format of tool calls says of itself, to grammars, parsers and prompts alike."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class ToolFormat(NamedTuple):
    r"""Calls are written

        BEGIN  call_begin HEAD arguments tail call_end  between ...  end

    name       as the flag `--tool-call-parser` has it
    models     those that write it, in words
    begins     what may open the calls; the first is what a grammar writes. All end alike
    head       before the arguments; NAME is the tool's, IDX a number, from 0
    head_read  finds a head while it arrives: groups `name` and perhaps `id`, ends where the
               arguments begin. Must not match a part of a head that would match otherwise
    tail       after the arguments
    end        "": one call is all, and nothing closes it
    marks      of which each may be a token; they are read though a special token is not shown
    signs      what a template has in it that writes this
    """

    name: str
    models: str
    begins: tuple[str, ...]
    call_begin: str
    head: str
    head_read: re.Pattern[str]
    tail: str
    call_end: str
    between: str
    end: str
    marks: tuple[str, ...]
    signs: tuple[str, ...]

    def call(self, name: str, arguments: str, position: int = 0) -> str:
        """One call; its tool may be any text."""
        return f"{self.call_begin}{self.head_of(name, str(position))}{arguments}{self.close}"

    def head_of(self, name: str, number: str) -> str:
        """The head of a tool's call."""
        before, idx, after = self.head.partition("IDX")
        return before.replace("NAME", name) + (number if idx else "") + after

    @property
    def opening(self) -> str:
        """What stands before the first call, however it began."""
        return self.begins[-1] + self.call_begin

    @property
    def close(self) -> str:
        """All that ends a call."""
        return self.tail + self.call_end

    def write(self, *calls: str) -> str:
        """Calls (`call`) as a model writes them behind its text."""
        return self.begins[0] + self.between.join(calls) + self.end

    def triggers(self) -> list[tuple[str, str]]:
        """Of each begin: up to its first mark, which no other text has, and what is left."""
        ends = [min(b.find(m) + len(m) for m in self.marks if m in b) for b in self.begins]
        return [(b[:end], b[end:]) for b, end in zip(self.begins, ends, strict=True)]

    def beginning_without(self, texts: Iterable[str]) -> "ToolFormat":
        """Without the begins that have one of `texts` (what ends an answer) in them."""
        ends = tuple(filter(None, texts))
        begins = [one for one in self.begins if not any(text in one for text in ends)]
        return self._replace(begins=tuple(begins) or self.begins)

    @property
    def has_several(self) -> bool:
        """Whether an answer may have more than one call."""
        return bool(self.end)
