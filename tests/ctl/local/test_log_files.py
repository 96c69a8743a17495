"""Logs that are full begin anew, while their processes write on."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ctl.local import log_files
from ctl.local.log_files import LogFiles
from tests.eventually import eventually

MAX_BYTES = 1000
# A line a millisecond, numbered, each with one write, until it has said so many.
TALKER = """
import sys, time
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"line {number:06}\\n")
    sys.stdout.flush()
    time.sleep(0.001)
"""


def make(folder: Path, *, num_earlier: int) -> LogFiles:
    logs = LogFiles(folder, ["a", "b"], max_bytes=MAX_BYTES, num_earlier=num_earlier)
    logs.begin()
    return logs


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("num_earlier", [0, 1, 3])
def test_nothing_that_is_kept_is_lost_or_said_twice(tmp_path: Path, num_earlier: int) -> None:
    chance = random.Random(num_earlier)
    logs = make(tmp_path, num_earlier=num_earlier)
    fills: list[bytes] = [b""]
    with (tmp_path / "a.log").open("ab", buffering=0) as process:
        for _ in range(500):
            said = chance.randbytes(chance.randrange(100))
            process.write(said)
            fills[-1] += said
            logs.rotate()
            if len(fills[-1]) > MAX_BYTES:
                fills.append(b"")
    assert len(fills) > 10
    kept = {f"a.log.{number}": fills[-1 - number] for number in range(1, num_earlier + 1)}
    assert contents(tmp_path) == {"a.log": fills[-1], "b.log": b""} | kept


def test_of_an_earlier_cluster_nothing_is_left(tmp_path: Path) -> None:
    for name in ("a.log", "a.log.1", "a.log.12", "b.log.2", "c.log.1", "a.log.gz"):
        (tmp_path / name).write_text("old")
    make(tmp_path, num_earlier=2)
    old = {"c.log.1": b"old", "a.log.gz": b"old"}
    assert contents(tmp_path) == {"a.log": b"", "b.log": b""} | old


def test_without_room_for_a_copy_the_log_is_emptied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    logs = make(tmp_path, num_earlier=2)
    (tmp_path / "a.log").write_bytes(bytes(MAX_BYTES + 1))
    monkeypatch.setattr("shutil.copyfileobj", full_disk)
    logs.rotate()
    assert contents(tmp_path) == {"a.log": b"", "b.log": b""}


def test_logs_that_were_tidied_up_do_no_harm(tmp_path: Path) -> None:
    logs = make(tmp_path, num_earlier=1)
    (tmp_path / "a.log").unlink()
    (tmp_path / "b.log").write_bytes(bytes(MAX_BYTES + 1))
    logs.rotate()
    assert set(contents(tmp_path)) == {"b.log", "b.log.1"}


async def test_a_process_that_talks_for_long_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_LOOK_SECONDS", 0.02)
    num_lines = 2000
    logs = make(tmp_path, num_earlier=2)
    keeping = asyncio.create_task(logs.keep_small())
    with (tmp_path / "a.log").open("ab") as log:
        talker = subprocess.Popen([sys.executable, "-c", TALKER, str(num_lines)], stdout=log)
    await eventually(lambda: talker.poll() is not None)
    assert talker.wait() == 0
    await eventually(lambda: (tmp_path / "a.log").stat().st_size <= MAX_BYTES)
    keeping.cancel()
    lines = b"".join(
        contents(tmp_path)[name] for name in ("a.log.2", "a.log.1", "a.log")
    ).splitlines()
    assert len(lines) < num_lines
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > num_lines - 100
