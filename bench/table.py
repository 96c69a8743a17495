"""Tables of performance in a page, from recorded results: `python -m bench.table README.md`.

Between two marker lines stands, for each measured case, the newest number that was compared with a
peer. The first may name the benches it is about, in their order, `floor`, where that is to count as
a peer, and `alone`, to have numbers without a peer as well:
`<!-- bench.table: begin w4a8_grouped_gemm floor -->`. With `chosen` alone there is one table of the
few rows of CHOSEN_ROWS. `--check` fails when the file is not what would be written.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.records import RESULTS, read
from loadgen.records import Record

BEGIN = "<!-- bench.table: begin -->"
END = "<!-- bench.table: end -->"
FLOOR, ALONE, CHOSEN = "floor", "alone", "chosen"
_PART = re.compile(r"(<!-- bench\.table: begin([\w ]*) -->\n).*?" + re.escape(END), re.DOTALL)
_COUNT = re.compile(r"^\d+ x ")
_HEADER = (
    "| case | metric | epserve | peer | ratio |",
    "|---|---|---:|---:|---:|",
)
_CHOSEN_HEADER = ("| what | epserve | best peer | ratio | hardware |", "|---|---:|---:|---:|---|")
# In words; bench, case and metric of the records.
CHOSEN_ROWS = (
    ("whole cluster on two cores, 16 clients, output", "against_transformers",
     "concurrency 16, 48 requests of 128 + 64 tokens", "output_throughput"),
    ("the same, one client, 64 tokens: first token", "against_transformers",
     "concurrency 1, prompt of 64 tokens", "ttft_p50"),
    ("decode, int4 experts, 4 GPUs, batch 128, output of a GPU", "decode_full",
     "w4afp8, 61 layers, 4 ranks, deep_ep, context 2048, batch 128",
     "output tokens a second and GPU"),
    ("prefill, int4 experts, 4 GPUs, 4,096 tokens, input of a GPU", "prefill_full",
     "w4afp8, 61 layers, 4 ranks, deep_ep, 4096 tokens", "input tokens a second and GPU"),
    ("decode step of one rank, FP8, batch 128", "decode_rank",
     "fp8, 61 layers, context 2048, batch 128", "step"),
    ("decode step of one rank, int4 experts, batch 128", "decode_rank",
     "w4afp8, 61 layers, context 2048, batch 128", "step"),
    ("prefill pass of one rank, FP8, 4,096 tokens", "prefill_rank",
     "fp8, 61 layers, 4096 tokens", "pass"),
    ("prefill pass of one rank, int4 experts, 4,096 tokens", "prefill_rank",
     "w4afp8, 61 layers, 4096 tokens", "pass"),
    ("int4 product, 32 experts of 128 rows", "w4a8_grouped_gemm",
     "masked e32 m128 n4096 k7168", "time"),
    ("attention at decode, batch 128, 4,096 tokens each", "mla_decode",
     "b128 heads128 kv4096", "time"),
    ("dispatch and combine, 4 GPUs, 128 tokens each", "ep",
     "4 ranks, 128 tokens each, deep_ep masked, FP8", "round_trip"),
    ("placing the experts of 61 layers on 32 ranks", "eplb",
     "61 layers of 256, 32 x 9 slots, 4 nodes", "full rebalance"),
)  # fmt: skip
# For these units more is better.
_RATES = ("tokens/s", "requests/s", "GB/s", "GB/min", "TFLOP/s", "mean over max")


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
    the peer, whatever the unit. `names` of benches, none: all; FLOOR or ALONE: with such; CHOSEN:
    see `chosen`."""
    if CHOSEN in names:
        return chosen(records)
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


def chosen(records: Iterable[Record]) -> str:
    """Markdown of CHOSEN_ROWS, each the newest there is, beside the best of its peers. Raises
    ValueError where there is none."""
    latest = [each for each in newest(records) if each.peer_value and each.peer != FLOOR]
    rows = list(_CHOSEN_HEADER)
    for what, *key in CHOSEN_ROWS:
        found = [each for each in latest if [each.bench, each.case, each.metric] == key]
        if not found:
            raise ValueError(f"no record with a peer: {key}")
        best = max(found, key=lambda each: (each.date, -_ratio(each)))
        rows.append(f"| {what} | {_compared(best)} | {best.gpu} |")
    return "\n".join(rows)


def _row(record: Record) -> str:
    return f"| {record.case} | {record.metric} | {_compared(record)} |"


def _compared(record: Record) -> str:
    """Cells: ours, the peer's, the ratio."""
    value = _amount(record.value, record.unit)
    if not record.peer_value:
        return f"{value} | |"
    peer = f"{record.peer}: {_amount(record.peer_value, record.unit)}"
    return f"{value} | {peer} | {_ratio(record):.2f}x"


def _ratio(record: Record) -> float:
    ratio = record.value / (record.peer_value or 1.0)
    return ratio if record.unit in _RATES else 1 / ratio


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
