"""Tables of performance in a page, from recorded results: `python -m bench.table README.md`.

Between two marker lines stands, for each measured case, the newest number that was compared with a
peer. The first may name the benches it is about, in their order, `floor`, where that is to count as
a peer, and `alone`, to have numbers without a peer as well:
`<!-- bench.table: begin w4a8_grouped_gemm floor -->`. `--check` fails when the file is not what
would be written.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.records import RESULTS, Record, read

BEGIN = "<!-- bench.table: begin -->"
END = "<!-- bench.table: end -->"
FLOOR, ALONE = "floor", "alone"
_PART = re.compile(r"(<!-- bench\.table: begin([\w ]*) -->\n).*?" + re.escape(END), re.DOTALL)
_COUNT = re.compile(r"^\d+ x ")
_HEADER = (
    "| case | metric | epserve | peer | ratio |",
    "|---|---|---:|---:|---:|",
)
# For these units more is better.
_RATES = ("tokens/s", "requests/s", "GB/s", "TFLOP/s", "mean over max")


def newest(records: Iterable[Record]) -> list[Record]:
    """The last record of each case, metric, peer and hardware, in order of first appearance.
    How many GPUs a machine has does not tell: a case names its ranks."""
    latest: dict[tuple[str, ...], Record] = {}
    for record in records:
        model = _COUNT.sub("", record.gpu)
        key = (record.bench, record.case, record.metric, model, record.peer or "")
        if key not in latest or record.date >= latest[key].date:
            latest[key] = record
    return list(latest.values())


def table(records: Iterable[Record], names: Sequence[str] = (FLOOR,)) -> str:
    """Markdown, one table a benchmark and hardware. The ratio says how many times better than
    the peer, whatever the unit. `names` of benches, none: all; FLOOR or ALONE: with such."""
    parts: dict[str, list[str]] = {}
    benches = [name for name in names if name not in (FLOOR, ALONE)]
    found = [record for record in newest(records) if not benches or record.bench in benches]
    if benches:
        found.sort(key=lambda record: benches.index(record.bench))
    for record in found:
        if FLOOR in names if record.peer == FLOOR else record.peer_value or ALONE in names:
            title = f"`bench.{record.bench}` on {record.gpu}, commit {record.commit}:"
            parts.setdefault(title, []).append(_row(record))
    return "\n\n".join("\n".join([title, "", *_HEADER, *rows]) for title, rows in parts.items())


def _row(record: Record) -> str:
    value = f"| {record.case} | {record.metric} | {_amount(record.value, record.unit)} |"
    if not record.peer_value:
        return f"{value} | |"
    ratio = record.value / record.peer_value
    if record.unit not in _RATES:
        ratio = 1 / ratio
    return f"{value} {record.peer}: {_amount(record.peer_value, record.unit)} | {ratio:.2f}x |"


def _amount(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.4g} {unit}"


def with_tables(text: str, records: Sequence[Record]) -> str:
    """`text` with what is between markers replaced. Raises ValueError without markers."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}{table(records, found[2].split())}\n{END}"

    new, count = _PART.subn(part, text)
    if not count:
        raise ValueError(f"no line {BEGIN} followed by {END}")
    return new


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.table", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    records = [
        record for file in sorted(arguments.results.glob("*.jsonl")) for record in read(file)
    ]
    old = arguments.file.read_text(encoding="utf-8")
    new = with_tables(old, records)
    if arguments.check and new != old:
        sys.stderr.write(f"{arguments.file} is stale: python -m bench.table {arguments.file}\n")
        return 1
    arguments.file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
