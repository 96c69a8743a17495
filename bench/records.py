"""Where the records of benches are kept, how they are shown, and reading them again."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from loadgen.records import Record, append

RESULTS = Path(__file__).parent / "results"


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """With the flags that say whether and where to record, for `path_of`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to")
    return parser


def path_of(bench: str, arguments: argparse.Namespace) -> Path | None:
    """The file of the records of `bench`, if they are to be kept."""
    return arguments.results / f"{bench}.jsonl" if arguments.record else None


def report(records: Iterable[Record], path: Path | None) -> list[Record]:
    """Prints each as it comes, once it is appended to `path`, if there is one: a run that is cut
    short keeps what it has. Raises OSError."""
    reported = []
    for record in records:
        if path is not None:
            append(path, [record])
        line = f"{record.case:48} {record.metric:32} {record.value:10g} {record.unit}"
        if record.peer_value is not None:
            ratio = record.value / record.peer_value if record.peer_value else float("nan")
            line += f"  ({record.peer}: {record.peer_value:g}, ratio {ratio:.2f})"
        say(line)
        reported.append(record)
    return reported


def say(text: str) -> None:
    """On stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def read(path: Path) -> Iterator[Record]:
    """Records of a file, oldest first. Raises ValueError, with the line, for anything else."""
    names = {each.name for each in fields(Record)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        values = json.loads(line)
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{path}:{number} is not a record of {sorted(names)}")
        yield Record(**values)
