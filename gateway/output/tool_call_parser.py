"""Tool calls found in a model's output while it arrives, in any of the formats.

The arguments are handed out as they come, from a value's first character to its last: marks of the
format within its strings are text. The marks are looked for in the text: they need not be tokens.
Marks without a call are text.

Each character costs a bounded number of steps: what is held back is looked at once, then set aside
in pieces, and joined when it is told.
"""

import secrets
from re import Match
from typing import TYPE_CHECKING

from gateway.formats.tool_format import ToolFormat
from gateway.output.choice_delta import CallDelta
from gateway.output.json_end import JsonEnd

if TYPE_CHECKING:
    from collections.abc import Callable

# What is longer between the begin of a call and its arguments is no head.
MAX_HEAD = 512
# Looked at together: each move of a step copies what is left of them.
PIECE_CHARACTERS = 1024


class ToolCallParser:
    """Splits one choice's text. `num_calls` is how many calls have begun."""

    def __init__(self, form: ToolFormat, *, at_most_one: bool) -> None:
        """`at_most_one`: what comes after the first call is left out."""
        self.num_calls = 0
        self.form = form
        self._at_most_one = at_most_one
        self._openers = tuple(filter(None, (*form.begins, form.call_begin)))
        self._step: Callable[[], bool] = self._text
        self._buffer = ""
        self._passed: list[str] = []  # before the buffer: held back, and has no part of a mark
        self._opened = ""  # marks that are text if no call follows
        self._space: list[str] = []  # held back: dropped if calls follow
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._ids: set[str] = set()
        self._value: JsonEnd | None = None

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        """What of `text`, and of what was held back before it, can be told."""
        for begin in range(0, len(text), PIECE_CHARACTERS):
            self._buffer += text[begin : begin + PIECE_CHARACTERS]
            while self._step():
                pass
        return self._take()

    def finish(self, *, is_cut_off: bool) -> tuple[str, list[CallDelta]]:
        """All that was held back. `is_cut_off`: more would have come. The arguments of a call
        that was cut off stay cut off, and what is before them is left out."""
        rest = self._held(len(self._buffer))
        if self._step == self._arguments:
            self._hand_out(rest if self._value else self._without_tail(rest))
        elif self._step == self._text:
            self._say(rest)
        elif not is_cut_off:  # nothing gets lost
            is_tail = self._step == self._tail
            self._say(self._opened + (self._without_tail(rest) if is_tail else rest))
        is_opened = is_cut_off and self._opened
        if not self.num_calls and not is_opened:  # space around calls means nothing
            self._content += self._space
        self._space.clear()
        self._opened = ""
        return self._take()

    def _held(self, length: int) -> str:
        """Takes what was passed, and so many characters of the buffer."""
        held = "".join(self._passed) + self._buffer[:length]
        self._passed.clear()
        self._buffer = self._buffer[length:]
        return held

    def _pass(self, marks: tuple[str, ...]) -> None:
        """Sets aside what is no part of any of `marks`, whatever comes."""
        length = len(self._buffer) - _num_begun(self._buffer, marks)
        self._passed.append(self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    # Each step is one move as far as the buffer goes; false when more text is needed.

    def _text(self) -> bool:
        marks = (*self._openers, self.form.end) if self.num_calls else self._openers
        position, mark = _first(self._buffer, marks)
        if not mark:
            position = len(self._buffer) - _num_begun(self._buffer, marks)
        self._say(self._buffer[:position])
        self._buffer = self._buffer[position + len(mark) :]
        if mark in self._openers:
            self._opened = mark
            is_call = mark == self.form.call_begin
            self._step = self._head if is_call or not self.form.call_begin else self._between
        return bool(mark)

    def _say(self, text: str) -> None:
        if self.num_calls and self._at_most_one:
            return
        if shown := text.rstrip():
            self._content += (*self._space, shown)
            self._space.clear()
        self._space.append(text[len(shown) :])

    def _between(self) -> bool:
        """Only space stands before a call, and between calls."""
        rest = self._buffer.lstrip()
        self._passed.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        if rest.startswith(self.form.call_begin):
            self._opened += self._held(len(self.form.call_begin))
            self._step = self._head
            return True
        if not self._opened and rest.startswith(self.form.end):
            self._held(len(self.form.end))
        elif any(mark.startswith(rest) for mark in (self.form.call_begin, self.form.end)):
            return False
        self._opened += self._held(0)
        self._take_for_text()
        return True

    def _take_for_text(self) -> None:
        self._say(self._opened)
        self._opened = ""
        self._step = self._text

    def _head(self) -> bool:
        found = self.form.head_read.match(self._buffer[:MAX_HEAD])
        if found is not None:
            self._begin_call(found)
            return True
        _, mark = _first(self._buffer, (self.form.call_end, *self._openers))
        if mark or len(self._buffer) >= MAX_HEAD or self._is_no_head():
            self._take_for_text()
            return True
        return False

    def _is_no_head(self) -> bool:
        """Of a format whose calls are told by their heads alone."""
        begun = self._buffer.lstrip()[:1]
        return not self.form.call_begin and not self.form.head.startswith(begun)

    def _begin_call(self, found: Match[str]) -> None:
        groups = found.groupdict()
        call_id = groups.get("id")
        if call_id is None or call_id in self._ids:
            call_id = f"call_{secrets.token_hex(12)}"
        self._ids.add(call_id)
        self._buffer = self._buffer[found.end() :]
        self._opened = ""
        self._space.clear()
        self.num_calls += 1
        name = (groups["name"] or groups.get("plain") or "").strip()
        self._add(CallDelta(self.num_calls - 1, "", call_id, name))
        has_end = self._buffer[:1] in ("{", "[", '"')
        self._value = JsonEnd(self.form.call_end) if has_end else None
        self._step = self._arguments

    def _arguments(self) -> bool:
        if self._value is not None:
            length, is_over = self._value.find(self._buffer)
            self._hand_out(self._held(length))
        else:  # a number, or no JSON: short
            length = self._buffer.find(self.form.call_end)
            is_over = length >= 0
            if is_over:
                self._hand_out(self._without_tail(self._held(length)) or "{}")
            else:
                self._pass((self.form.call_end,))
        if is_over:
            self._step = self._tail
        return is_over

    def _hand_out(self, arguments: str) -> None:
        if arguments:
            self._add(CallDelta(self.num_calls - 1, arguments))

    def _without_tail(self, text: str) -> str:
        return text.strip().removesuffix(self.form.tail.strip()).strip()

    def _tail(self) -> bool:
        """What stands behind the arguments, which is nothing but the call's end, is left out."""
        marks = (self.form.call_end, *self._openers, self.form.end)
        position, mark = _first(self._buffer, marks)
        if not mark:
            self._pass(marks)
            return False
        is_end = mark == self.form.call_end
        self._held(position + (len(mark) if is_end else 0))  # and left out
        self._step = self._between if self.form.call_begin else self._text
        return True

    def _add(self, delta: CallDelta) -> None:
        if delta.index == 0 or not self._at_most_one:
            self._calls.append(delta.behind(sum(map(len, self._content))))


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of `marks` stands, and which one, the longest of several; -1 and "" where
    none does."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark and mark in text]
    position, _, mark = min(found, default=(-1, 0, ""))
    return position, mark


def _num_begun(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = max(map(len, marks))
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
