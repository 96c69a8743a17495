"""Where a JSON value ends that arrives in pieces."""

import re

# Within a string: as far as is sure, a backslash and what it escapes together.
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class JsonEnd:
    """Follows an object, a list or a string, whose first character is the first that comes."""

    def __init__(self, mark: str) -> None:
        """`mark` ends a value that is broken off, unless it stands in a string."""
        self._mark = mark if len(mark) > 1 else ""
        self._outside = re.compile(rf'["{{}}[\]{re.escape(self._mark[:1])}]')
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> tuple[int, bool]:
        """How much of `text` belongs to the value for sure, and whether it ends there. What does
        not is to come again, with more behind it."""
        position = 0
        while position < len(text):
            if self._in_string:
                position = _IN_STRING.match(text, position).end()  # type: ignore[union-attr]
                if text[position : position + 1] != '"':
                    break
                self._in_string = False
                position += 1
            else:
                found = self._outside.search(text, position)
                if found is None:
                    return len(text), False
                position = found.start()
                if self._mark and text[position] == self._mark[0]:
                    rest = text[position : position + len(self._mark)]
                    if self._mark.startswith(rest):
                        return position, rest == self._mark
                position += 1
                self._enter(found[0])
            if not self._depth and not self._in_string:
                return position, True
        return position, False

    def _enter(self, character: str) -> None:
        self._in_string = character == '"'
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
