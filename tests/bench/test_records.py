"""Records of measurements, and the table made from them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import table
from bench.records import RESULTS, read, report
from loadgen.records import Record, append

RECORD = Record(
    date="2026-01-01T00:00:00+00:00",
    commit="abc",
    gpu="cpu: 2 x X",
    bench="b",
    case="a case",
    metric="output_throughput",
    unit="tokens/s",
    value=300.0,
    peer="peer",
    peer_value=100.0,
)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.jsonl"
    append(file, [RECORD])
    append(file, [replace(RECORD, peer=None, peer_value=None)])
    assert list(read(file)) == [RECORD, replace(RECORD, peer=None, peer_value=None)]
    assert set(json.loads(file.read_text().splitlines()[0])) == {
        "date",
        "commit",
        "gpu",
        "bench",
        "case",
        "metric",
        "unit",
        "value",
        "peer",
        "peer_value",
    }


def test_a_run_that_is_cut_short_keeps_what_it_has(tmp_path: Path) -> None:
    second = replace(RECORD, case="another")

    def measure() -> Iterator[Record]:
        yield RECORD
        yield second
        raise RuntimeError("out of time")

    file = tmp_path / "r.jsonl"
    with pytest.raises(RuntimeError, match="out of time"):
        report(measure(), file)
    assert list(read(file)) == [RECORD, second]
    assert report([RECORD], None) == [RECORD]


@pytest.mark.parametrize("line", ['{"date": 1}', "[]", "nonsense"])
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "r.jsonl"
    append(file, [RECORD])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError):
        list(read(file))


def test_the_newest_record_of_a_case_wins() -> None:
    newer = replace(RECORD, date="2026-02-01T00:00:00+00:00", value=400.0)
    other = replace(RECORD, case="another case")
    assert table.newest([newer, other, RECORD]) == [newer, other]


def test_ratios_say_how_much_better() -> None:
    slower = replace(RECORD, case="lone", metric="ttft_p50", unit="s", value=0.05, peer_value=0.02)
    alone = replace(RECORD, case="alone", peer=None, peer_value=None)
    gpu = replace(RECORD, gpu="1 x Y", bench="c")
    assert table.table([RECORD, gpu, slower, alone]).splitlines() == [
        "`bench.b` on cpu: 2 x X, commit abc:",
        "",
        "| case | metric | epserve | peer | ratio |",
        "|---|---|---:|---:|---:|",
        "| a case | output_throughput | 300 tokens/s | peer: 100 tokens/s | 3.00x |",
        "| lone | ttft_p50 | 50 ms | peer: 20 ms | 0.40x |",
        "",
        "`bench.c` on 1 x Y, commit abc:",
        "",
        "| case | metric | epserve | peer | ratio |",
        "|---|---|---:|---:|---:|",
        "| a case | output_throughput | 300 tokens/s | peer: 100 tokens/s | 3.00x |",
    ]


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", [RECORD])
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n")
    arguments = [str(readme), "--results", str(tmp_path)]
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    assert table.main([*arguments, "--check"]) == 0
    lines = readme.read_text().splitlines()
    assert lines[0] == "above"
    assert lines[-1] == "below"
    assert "old" not in lines
    assert any("3.00x" in line for line in lines)
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="no line"):
        table.main(arguments)


def test_markers_name_what_is_between_them(tmp_path: Path) -> None:
    floor = replace(RECORD, bench="c", peer="floor")
    lone = replace(RECORD, bench="d", peer=None, peer_value=None)
    append(tmp_path / "r.jsonl", [RECORD, floor, lone])
    page = tmp_path / "page.md"
    names = ("d alone", "c b", "c floor")
    page.write_text("".join(f"<!-- bench.table: begin {each} -->\n{table.END}\n" for each in names))
    assert table.main([str(page), "--results", str(tmp_path)]) == 0
    benches = [line.split("`")[1] for line in page.read_text().splitlines() if line[:1] == "`"]
    assert benches == ["bench.d", "bench.b", "bench.c"]
    assert "| a case | output_throughput | 300 tokens/s | | |" in page.read_text()


def test_a_few_rows_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("In words", RECORD.bench, RECORD.case, RECORD.metric)
    monkeypatch.setattr(table, "CHOSEN_ROWS", (words,))
    floor = replace(RECORD, peer="floor", date="2027-01-01T00:00:00+00:00")
    better = replace(RECORD, peer="a better peer", peer_value=400.0)
    assert table.table([RECORD, floor, better], ["chosen"]).splitlines() == [
        "| what | epserve | best peer | ratio | hardware |",
        "|---|---:|---:|---:|---|",
        "| In words | 300 tokens/s | a better peer: 400 tokens/s | 0.75x | cpu: 2 x X |",
    ]
    with pytest.raises(ValueError, match="no record with a peer"):
        table.table([floor], ["chosen"])


def test_every_chosen_row_has_a_record() -> None:
    records = [each for file in RESULTS.glob("*.jsonl") for each in read(file)]
    assert len(table.chosen(records).splitlines()) == 2 + len(table.CHOSEN_ROWS)


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/experts.md"])
def test_tables_of_pages_are_those_of_the_records(page: str) -> None:
    assert table.main([str(Path(__file__).parents[2] / page), "--check"]) == 0
