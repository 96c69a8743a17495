"""The soak: its traffic, what it reads of processes, its records and its picture."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.pictures.soak import draw, main, read_lines
from bench.records import read
from bench.serving.nasty_traffic import Manner, NastyTraffic
from bench.soak import held, records
from loadgen.records import BenchRun

REPOSITORY = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9"  # the gateway that would tell its tasks


def test_traffic_is_the_same_for_a_seed_and_never_twice_the_same() -> None:
    traffic, again = NastyTraffic(3, "m"), NastyTraffic(3, "m")
    requests = [traffic.make() for _ in range(300)]
    assert requests == [again.make() for _ in range(300)]
    whole = [request.data for request in requests if request.manner is not Manner.CUT]
    assert len(set(whole)) == len(whole)
    assert {request.manner for request in requests} == set(Manner)


def test_whole_requests_are_http_with_bodies_of_json() -> None:
    traffic = NastyTraffic(4, "m")
    whole = [one for one in (traffic.make() for _ in range(200)) if one.manner is not Manner.CUT]
    constraints = set()
    for request in whole:
        head, _, rest = request.data.partition(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        body = json.loads(b"".join(chunks(rest)))
        constraints |= {name for name in body if name.startswith("guided_") or name == "tools"}
    kinds = {"guided_json", "guided_regex", "guided_grammar", "guided_choice", "tools"}
    assert constraints == kinds


def chunks(data: bytes) -> Iterator[bytes]:
    while True:
        size, _, data = data.partition(b"\r\n")
        if not int(size, 16):
            return
        yield data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


def test_what_a_process_holds() -> None:
    code = "x = bytearray(64 * 2**20); print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        of = held(NOWHERE)[Path(sys.executable).name]
        process.communicate(b"\n")
    assert 64 * 2**20 <= of["anonymous_bytes"] <= of["rss_bytes"]
    assert of["threads"] == 1
    assert of["fds"] >= 3


def lines(*megabytes: float) -> list[dict[str, Any]]:
    return [
        {"seconds": 60 * minute, "answers": {"200": 5},
         "held": {"gateway": {"rss_bytes": size * 2**20, "fds": 20, "tasks": 9, "cpu_seconds": 1}}}
        for minute, size in enumerate(megabytes)
    ]  # fmt: skip


def test_the_last_quarter_is_compared_with_the_second() -> None:
    run = BenchRun.begin("soak", on_cpu=True)
    found = {
        one.metric: (one.value, one.unit, one.peer_value)
        for one in records(run, lines(10, 20, 100, 102, 90, 90, 130, 132), "a case")
    }
    assert found == {
        "gateway: rss": (131.0, "MB", 101.0),
        "gateway: fds": (20.0, "descriptors", 20.0),
        "gateway: tasks": (9.0, "tasks", 9.0),
    }


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(10, 20)))
    assert main([str(tmp_path / "soak.png"), str(path)]) == 0
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    draw(read_lines(path), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "soak.png").read_bytes()
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match=r"no lines of bench\.soak"):
        read_lines(path)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_short_run(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--minutes", "0.4", "--every-seconds", "3", "--rate",
         "5", "--results", str(tmp_path), "--record"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    minutes = read_lines(tmp_path / "details" / "soak.jsonl")
    assert len(minutes) >= 4
    assert {"gateway", "router", "prefill ranks", "decode ranks"} <= minutes[-1]["held"].keys()
    answers = {status for line in minutes for status in line["answers"]}
    assert {"plain", "200", "400"} <= answers
    assert not {status for status in answers if status.startswith("5")}
    assert {record.metric for record in read(tmp_path / "soak.jsonl")} >= {"gateway: tasks"}
