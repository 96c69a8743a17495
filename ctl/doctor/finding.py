"""What `ctl doctor` finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `advice` says what to do, "" where there is nothing."""

    check: str
    state: Literal["ok", "note", "warning", "missing"]
    detail: str
    advice: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def note(check: str, detail: str, advice: str = "") -> Finding:
    """Not there, and not needed."""
    return Finding(check, "note", detail, advice)


def warning(check: str, detail: str, advice: str) -> Finding:
    """Works, but worse."""
    return Finding(check, "warning", detail, advice)


def missing(check: str, detail: str, advice: str) -> Finding:
    """epserve does not work without it."""
    return Finding(check, "missing", detail, advice)
