"""What regular expressions and EBNF must not hold: numbers that the compiler would take for
others."""

import re

# Above 2^31 the compiler's own numbers wrap.
MAX_REPEATS = 1_000_000
LAST_CODE_POINT = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)

_ESCAPE = re.compile(
    r"\\(?:U([0-9a-fA-F]{8})|[ux]\{([0-9a-fA-F]*)\}|u([0-9a-fA-F]{4})|.)", re.DOTALL
)
_CLASS = re.compile(r"\[[^\]]*\]?")
_LITERAL = re.compile(r'"[^"\n]*"|#[^\n]*')
_REPEAT = re.compile(r"\{\s*([0-9]*)\s*(?:,\s*([0-9]*)\s*)?\}")


def pattern_fault(text: str, *, is_ebnf: bool = False) -> str | None:
    """Why `text` would not be kept to; None: nothing was found."""
    for escape in _ESCAPE.finditer(text):
        digits = escape[1] or escape[2] or escape[3]
        if digits is None:
            continue
        code_point = int(digits, 16)
        if code_point > LAST_CODE_POINT:
            return f"{escape[0][:24]} is past the last character, U+10FFFF"
        if code_point in SURROGATES:
            return f"{escape[0][:24]} is half of a surrogate pair, not a character"
    bare = _ESCAPE.sub("", text)
    # In EBNF a bracket may stand in a literal, and a quote in a class.
    bare = _CLASS.sub("", _LITERAL.sub("", bare) if is_ebnf else bare)
    for repeat in _REPEAT.finditer(bare):
        if any(len(count) > 15 or int(count) > MAX_REPEATS for count in repeat.groups() if count):
            return f"at most {MAX_REPEATS} repeats can be counted"
    return None
