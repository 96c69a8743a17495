"""Children that die with their parents, stop signals; with real processes."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from core.process import Identity, new_epoch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

CHILD = """
import os, sys, time
from core.process import die_with_parent
die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else None)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
time.sleep(60)
"""
STOPPING = """
import asyncio
from core.signals import stop_event
async def main():
    stop = stop_event()
    print("up", flush=True)
    await stop.wait()
    print("stopped", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def test_a_child_dies_with_its_killed_parent() -> None:
    with start(PARENT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        descriptor = os.pidfd_open(child)
        parent.kill()
        readable, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        parent.stdout.close()
    assert readable, "the child outlived its parent"


def test_a_child_whose_parent_is_gone_already_leaves_at_once() -> None:
    with start(CHILD, "1") as child:  # not the pid of its parent
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "parent process 1 is gone" in errors


def test_the_first_signal_stops_and_the_second_kills() -> None:
    with start(STOPPING) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_epochs_differ_and_identities_know_their_process() -> None:
    assert len({new_epoch() for _ in range(1000)}) == 1000
    identity = Identity(role="router", name="r", address="h:1")
    assert identity.pid == os.getpid()
    assert len(identity.epoch) == 16
