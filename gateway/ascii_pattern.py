"""Patterns of tokenizers (Oniguruma's, of tokenizer.json) as Python's, for ASCII text alone.

Only there do the two agree for sure: they come with different versions of Unicode. What is not
known to mean the same is refused.
"""

import re
from collections.abc import Callable, Iterable

# What each category is among the ASCII characters, as the inside of a character class.
_CATEGORIES = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "M": "",
    "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<->^`|~",
}
_SPACE = r"\t-\r "
_CATEGORY = re.compile(r"\\p\{(\w+)\}")
# Escapes that mean one character, the same in both.
_ESCAPED = frozenset("rntfv" + r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~""")
_GROUPS = ("(?:", "(?i:", "(?=", "(?!")
_COUNT = re.compile(r"\{\d+(,\d*)?\}")
_PLAIN = re.compile(r"[^\\\[\](){}*+?.^$|#&]")


class UnknownPattern(Exception):
    """A pattern with something in it that might mean something else in Python."""


def piece_finder(source: str, *, is_everywhere: bool) -> Callable[[str], Iterable[str]]:
    """From an ASCII text to the matches of `source` in it and the stretches between them, in
    order. `is_everywhere` says which there are more of, and so which way is the quick one.
    Raises UnknownPattern."""
    translated = _Translation(source).run()
    try:
        if re.match(translated, "", re.ASCII):
            raise UnknownPattern("it matches nothing at all")
        if is_everywhere:
            return re.compile(rf"{translated}|(?:(?!{translated})[\s\S])+", re.ASCII).findall
        split = re.compile(f"({translated})", re.ASCII).split
    except re.error as error:
        raise UnknownPattern(str(error)) from error
    return lambda text: filter(None, split(text))


class _Translation:
    def __init__(self, source: str) -> None:
        self._source = source
        self._position = 0

    def run(self) -> str:
        parts = []
        while self._position < len(self._source):
            parts.append(self._next())
        return f"(?:{''.join(parts)})"

    def _next(self) -> str:
        letter = self._source[self._position]
        if letter == "\\":
            inside = self._escape()
            if inside.startswith("^"):
                return f"[{inside}]"
            return f"[{inside}]" if inside else "(?!)"
        if letter == "[":
            return self._class()
        if letter == "(":
            for group in _GROUPS:
                if self._takes(group):
                    return group
        elif letter in ")|":
            self._position += 1
            return letter
        elif letter in "*+?{":
            return self._quantifier()
        elif _PLAIN.match(letter):
            self._position += 1
            return re.escape(letter)
        raise UnknownPattern(f"{letter!r} at {self._position}")

    def _quantifier(self) -> str:
        count = _COUNT.match(self._source, self._position)
        if self._source[self._position] == "{" and count is None:
            raise UnknownPattern(f"a brace at {self._position}")
        text = count.group() if count else self._source[self._position]
        self._position += len(text)
        if self._source[self._position : self._position + 1] in tuple("*+?{"):
            raise UnknownPattern(f"two quantifiers at {self._position}")
        return text

    def _escape(self) -> str:
        """The inside of a class; "^..." where it stands for all but that."""
        category = _CATEGORY.match(self._source, self._position)
        if category is not None and category[1] in _CATEGORIES:
            self._position = category.end()
            return _CATEGORIES[category[1]]
        letter = self._source[self._position + 1 : self._position + 2]
        self._position += 2
        if letter in ("s", "S"):
            return _SPACE if letter == "s" else f"^{_SPACE}"
        if letter and letter in _ESCAPED:
            return f"\\{letter}"
        raise UnknownPattern(f"the escape {letter!r}")

    def _class(self) -> str:
        self._position += 1
        is_negated = self._takes("^")
        inside = ""
        while not self._takes("]"):
            letter = self._source[self._position : self._position + 1]
            if letter == "\\":
                part = self._escape()
                if part.startswith("^"):
                    raise UnknownPattern("all but something in a class")
                inside += part
            elif not letter or letter == "[" or self._source.startswith("&&", self._position):
                raise UnknownPattern("a class that is not closed, or is in another one")
            else:
                self._position += 1
                # Ranges stay what they are.
                inside += letter if letter == "-" else re.escape(letter)
        if not inside:
            return r"[\s\S]" if is_negated else "(?!)"
        return f"[{'^' if is_negated else ''}{inside}]"

    def _takes(self, text: str) -> bool:
        if not self._source.startswith(text, self._position):
            return False
        self._position += len(text)
        return True
