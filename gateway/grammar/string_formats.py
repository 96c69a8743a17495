"""Formats of strings as regular expressions: not all that their RFCs allow, but nothing else.

What they leave out is what readers of such values refuse: quoted names in addresses, leap seconds,
the 30th of February, hosts without a letter.
"""

from collections.abc import Sequence
from functools import cache

from gateway.grammar.pattern_language import read_pattern
from gateway.grammar.regular import NOTHING, Node, both, is_within, plain

_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = rf"(?:{_LABEL}\.)*{_LABEL}\.[A-Za-z]{{2,}}"
_SHORT = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME = r"[A-Za-z0-9_+-]+"
_IN_PATH = r"[A-Za-z0-9_.~!$&'()*+,;=:@-]"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_HEX = "[0-9a-fA-F]"
_WORDS = "|".join(
    [rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}", rf"(?:{_HEX}{{1,4}}:){{1,7}}:", "::"]
    + [rf"(?:{_HEX}{{1,4}}:){{1,{7 - n}}}(?::{_HEX}{{1,4}}){{1,{n}}}" for n in range(1, 7)]
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        rf"P(?:[0-9]+W|{_CLOCK}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
        rf"(?:{_CLOCK})?)"
    ),
    "email": rf"{_NAME}(?:\.{_NAME})?@{_HOST}",
    "hostname": rf"(?:{_SHORT}\.)+[A-Za-z]{{2,20}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _WORDS,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}://(?:{_SHORT}\.){{1,4}}[A-Za-z]{{2,20}}(?::[1-9][0-9]{{0,3}})?(?:/{_IN_PATH}*)*"
        rf"(?:\?(?:{_IN_PATH}|[/?])*)?(?:#(?:{_IN_PATH}|[/?])*)?"
    ),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
# So long that no part of them is longer than names in DNS and mail may be.
LONGEST = {"email": 124, "hostname": 124}


@cache
def format_language(name: str) -> Node | None:
    """None for a format that is only a note, as most are."""
    return read_pattern(f"^(?:{FORMATS[name]})$") if name in FORMATS else None


def common_language(patterns: Sequence[str], name: str) -> Node:
    """Texts in which all of `patterns` are found and that have the format `name`, as a plain node.
    A format that no such text has is the note that most formats are.
    Raises ValueError."""
    found = plain(both(*map(read_pattern, patterns)))
    wanted = format_language(name)
    if wanted is None:
        return found
    if is_within(wanted, found):
        return wanted
    if is_within(found, wanted):
        return found
    common = plain(both(found, wanted))
    return found if common == NOTHING else common
