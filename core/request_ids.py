"""Ids of the parts of a request.

chatcmpl-4f...        the request, as its reply names it
chatcmpl-4f...-1      its second choice
chatcmpl-4f...-1.2    the third call for that choice, after two moves to other workers
"""

import re

_PART = re.compile(r"(-\d{1,6})?(\.\d{1,6})?")
_CALL = re.compile(r"\.\d{1,6}$")


def choice_id(request_id: str, index: int) -> str:
    """Id of one choice, counted over all prompts of the request."""
    return f"{request_id}-{index}"


def call_id(choice: str, number: int) -> str:
    """Id of the `number`-th call (from 0) for one choice."""
    return f"{choice}.{number}" if number else choice


def is_part_of(part: str, request_id: str) -> bool:
    """Whether `part` is the request, choice or call of that id, or within it."""
    return part.startswith(request_id) and bool(_PART.fullmatch(part, len(request_id)))


def choice_of(call: str) -> str:
    """The choice that a call is for."""
    return _CALL.sub("", call)
