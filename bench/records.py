"""Where the records of benches are kept, and reading them again."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from loadgen.records import Record, append

RESULTS = Path(__file__).parent / "results"


def kept(records: Iterable[Record], path: Path | None) -> Iterator[Record]:
    """Each as it comes, once it is appended to `path`, if there is one: a run that is cut short
    keeps what it has. Raises OSError."""
    for record in records:
        if path is not None:
            append(path, [record])
        yield record


def read(path: Path) -> Iterator[Record]:
    """Records of a file, oldest first. Raises ValueError, with the line, for anything else."""
    names = {each.name for each in fields(Record)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        values = json.loads(line)
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{path}:{number} is not a record of {sorted(names)}")
        yield Record(**values)
