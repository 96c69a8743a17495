"""What `ctl doctor` finds."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`state`: ok; note (not there and not needed); warning (works, but worse); missing
    (epserve does not work without). `advice` says what to do, "" where there is nothing."""

    check: str
    state: State
    detail: str
    advice: str = ""
