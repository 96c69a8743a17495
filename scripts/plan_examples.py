"""Writes the outputs of `ctl plan` that pages show: `python scripts/plan_examples.py`. A test fails
when one is not what the command prints (tests/ctl/plan/test_pages.py)."""

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from typer.testing import CliRunner  # noqa: E402 - needs the path above

from ctl.main import app  # noqa: E402

_SHOWN = re.compile(r"(?<=^\$ )(ctl plan .*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)


def with_outputs(text: str) -> str:
    """A page as it should be: behind each `$ ctl plan ...` what it prints."""
    return _SHOWN.sub(lambda shown: f"{shown[1]}\n{output_of(shown[1])}", text)


def output_of(command: str) -> str:
    """Of a command as an operator types it in the root of the repository."""
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    lines = [line.rstrip() for line in result.stdout.strip().splitlines()]
    return "\n".join(lines) + "\n"


def main() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_outputs(text), encoding="utf-8")


if __name__ == "__main__":
    main()
