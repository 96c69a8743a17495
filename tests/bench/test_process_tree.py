"""Processes of a tree tell where their threads are, and go on."""

import subprocess
import sys
import time
from pathlib import Path

from bench.process_tree import ask_for_stacks, descendants

ROOT = Path(__file__).resolve().parents[2]

# Says that it listens, then hangs in a function and, in another thread, in another.
CHILD = """
import threading, time
from core.log import configure
def first_wait(): time.sleep(60)
def second_wait(): time.sleep(60)
configure("router", "r0")
threading.Thread(target=first_wait, daemon=True).start()
print("ready", flush=True)
second_wait()
"""
PARENT = """
import subprocess, sys
deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_those_that_listen_tell_where_all_their_threads_are(tmp_path: Path) -> None:
    told = tmp_path / "stderr"
    with told.open("wb") as stderr:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT
        )
    children: list[int] = []
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = descendants(parent.pid)
        assert len(children) == 2
        ask_for_stacks(parent.pid)
        parent.stdout.close()
        while "second_wait" not in told.read_text():
            time.sleep(0.01)
        assert "first_wait" in told.read_text()
        assert descendants(parent.pid) == children
    finally:
        for each in (parent.pid, *children):
            subprocess.run(["kill", "-9", str(each)], check=False)
        parent.wait()
    assert descendants(parent.pid) == []
