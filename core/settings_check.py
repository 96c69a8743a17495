"""Whether processes would take their flags, without starting them.

On stdin, as JSON, pairs of a settings class, by its dotted name, and flags; on stdout, for each
pair what the process would say on stderr before it ended, empty for flags that it would take.
"""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from core.settings import ProcessSettings


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[str, list[str]]])
    sys.stdout.buffer.write(msgspec.json.encode([_complaint(*pair) for pair in asked]))


def _complaint(path: str, flags: Sequence[str]) -> str:
    module, _, name = path.rpartition(".")
    settings: type[ProcessSettings] = getattr(import_module(module), name)
    with redirect_stderr(io.StringIO()) as told:
        try:
            settings.parse(flags)
        except SystemExit:
            return told.getvalue()
    return ""


if __name__ == "__main__":
    main()
