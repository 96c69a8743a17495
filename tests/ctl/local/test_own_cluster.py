"""Processes of a cluster are known by what they were started with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ctl.local.own_cluster import NotOurs, OwnCluster, OwnProcess

# With a process of its own, which is nobody's to name.
RANK = """
import subprocess, sys
sleeper = "print(end='there', flush=True); input()"
subprocess.run([sys.executable, "-c", sleeper, "-m", "elsewhere"])
"""


def test_a_rank_has_its_workers_name(tmp_path: Path) -> None:
    (tmp_path / "decode_worker").mkdir()
    (tmp_path / "decode_worker" / "rank.py").write_text(RANK)
    start = {"local_rank": 3, "settings": {"name": "decode-7"}}
    environment = {"TMPDIR": str(tmp_path), "EPSERVE_RANK_START": json.dumps(start)}
    with subprocess.Popen(
        [sys.executable, "-m", "decode_worker.rank"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"there"
        found = OwnCluster(tmp_path).processes()
        with pytest.raises(NotOurs):
            OwnCluster(tmp_path).environment()  # of what only a rank is left
        process.communicate(b"\n")
    assert found == {"decode-7/3": OwnProcess(name="decode-7/3", role="decode", pid=process.pid)}
    assert found["decode-7/3"].front == "decode-7"
    assert OwnCluster(tmp_path).processes() == {}
