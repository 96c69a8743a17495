"""Tool calls found in a model's output, while it arrives.

DeepSeek-V3 and R1 write

    text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {"argument": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and V3.1 `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"argument": 1}<｜tool▁call▁end｜>`. Both are
read. The arguments are handed out as they come, from the object's first brace to its last, so that
they are JSON. The marks are looked for in the text: they need not be tokens.
"""

import secrets
from enum import Enum

from gateway.output.choice_delta import CallDelta

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class _State(Enum):
    TEXT = "before the calls, and after them"
    BETWEEN = "before a call, among calls"
    HEAD = "in a call, before its arguments"
    ARGUMENTS = "in the arguments"
    TAIL = "after the arguments, before the call's end"


class ToolCallParser:
    """Splits one choice's text. `num_calls` is how many calls have begun."""

    def __init__(self, *, at_most_one: bool) -> None:
        """`at_most_one`: what comes after the first call is left out."""
        self.num_calls = 0
        self._at_most_one = at_most_one
        self._state = _State.TEXT
        self._buffer = ""
        self._space = ""  # held back: dropped if calls follow
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        """What of `text`, and of what was held back before it, can be told."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self, *, is_cut_off: bool) -> tuple[str, list[CallDelta]]:
        """All that was held back. `is_cut_off`: more would have come. The arguments of a call
        that was cut off stay cut off, and what is before them is left out; marks without
        a call are text where the model has ended with them."""
        if self._state is _State.TEXT:
            self._say(self._buffer)
            if self.num_calls == 0:  # space around calls means nothing
                self._content.append(self._space)
        elif self._state is _State.ARGUMENTS:
            self._scan(len(self._buffer))
        elif self.num_calls == 0 and not is_cut_off:  # nothing gets lost
            marks = CALLS_BEGIN + (CALL_BEGIN if self._state is _State.HEAD else "")
            self._content.append(marks + self._buffer)
        self._buffer = self._space = ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _step(self) -> bool:
        """One move as far as the buffer goes; false when more text is needed."""
        match self._state:
            case _State.TEXT:
                return self._text()
            case _State.BETWEEN:
                return self._between()
            case _State.HEAD:
                return self._head()
            case _State.ARGUMENTS:
                return self._arguments()
            case _State.TAIL:
                return self._tail()

    def _text(self) -> bool:
        before, mark, rest = self._buffer.partition(CALLS_BEGIN)
        if mark:
            self._say(before)
            self._space = ""
            self._buffer, self._state = rest, _State.BETWEEN
            return True
        num_out = len(before) - _num_begun(before, CALLS_BEGIN)
        self._buffer = before[num_out:]
        self._say(before[:num_out])
        return False

    def _say(self, text: str) -> None:
        if self.num_calls and self._at_most_one:
            return
        shown = (self._space + text).rstrip()
        self._space = (self._space + text)[len(shown) :]
        self._content.append(shown)

    def _between(self) -> bool:
        begin, end = self._buffer.find(CALL_BEGIN), self._buffer.find(CALLS_END)
        if begin >= 0 and (end < 0 or begin < end):
            self._buffer = self._buffer[begin + len(CALL_BEGIN) :]
            self._state = _State.HEAD
            return True
        if end >= 0:
            self._buffer = self._buffer[end + len(CALLS_END) :]
            self._state = _State.TEXT
            return True
        return False

    def _head(self) -> bool:
        brace, end = self._buffer.find("{"), self._buffer.find(CALL_END)
        if brace < 0 and end < 0:
            return False
        has_arguments = brace >= 0 and (end < 0 or brace < end)
        cut = brace if has_arguments else end
        name = _name(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        self.num_calls += 1
        arguments = "" if has_arguments else "{}"
        self._add(CallDelta(self.num_calls - 1, arguments, f"call_{secrets.token_hex(12)}", name))
        self._state = _State.ARGUMENTS if has_arguments else _State.TAIL
        self._depth, self._in_string, self._is_escaped = 0, False, False
        return True

    def _arguments(self) -> bool:
        end = self._buffer.find(CALL_END)
        limit = len(self._buffer) - _num_begun(self._buffer, CALL_END) if end < 0 else end
        if self._scan(limit) or end >= 0:
            self._state = _State.TAIL
            return True
        return False

    def _scan(self, limit: int) -> bool:
        """Hands out the buffer up to `limit`, or to the end of the object (true)."""
        position = 0
        is_over = False
        while position < limit and not is_over:
            is_over = self._is_last(self._buffer[position])
            position += 1
        if position:
            self._add(CallDelta(self.num_calls - 1, self._buffer[:position]))
            self._buffer = self._buffer[position:]
        return is_over

    def _is_last(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _tail(self) -> bool:
        _, mark, rest = self._buffer.partition(CALL_END)
        if mark:
            self._buffer, self._state = rest, _State.BETWEEN
        return bool(mark)

    def _add(self, delta: CallDelta) -> None:
        if delta.index == 0 or not self._at_most_one:
            self._calls.append(delta)


def _name(head: str) -> str:
    """From what stands before the arguments: `function<｜tool▁sep｜>NAME\\n```json\\n` or
    `NAME<｜tool▁sep｜>`."""
    kind, _, rest = head.partition(SEPARATOR)
    named = rest.strip() or kind.strip()
    return named.splitlines()[0].strip() if named else ""


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
