"""Supervision performed: real processes, which do as little as possible."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ctl.local.log_files import LogFiles
from ctl.local.process_spec import ProcessSpec
from ctl.local.supervision import Limits
from ctl.local.supervisor import Supervisor
from tests.eventually import eventually

QUICK = Limits(first_backoff_seconds=0.05, kill_after_seconds=0.3)

# Says on stdout that it is up, and stays until a signal comes.
SERVE = "import signal; print('up', flush=True); signal.pause()"
# The same; SIGTERM ends it well.
POLITE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while True:
    signal.pause()
"""
# The same, deaf to SIGTERM, with a child in its process group that is deaf as well.
DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
print("up", flush=True)
while True:
    signal.pause()
"""


def spec(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role="router",
        address="127.0.0.1:1",
        command=(sys.executable, "-c", code),
    )


class Heard:
    """A Reporter whose words can be awaited."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.pids: dict[str, int] = {}
        self.num_starts: Counter[str] = Counter()

    async def until(self, kind: str) -> tuple[object, ...]:
        async with asyncio.timeout(20):
            while (word := await self.words.get())[0] != kind:
                pass
            return word

    def waiting_for(self, names: Sequence[str]) -> None: ...

    def ready(self, name: str, seconds: float, again: bool) -> None:
        self.words.put_nowait(("ready", name, again))

    def started(self, name: str, pid: int) -> None:
        self.pids[name] = pid
        self.num_starts[name] += 1

    def all_ready(self, seconds: float) -> None:
        self.words.put_nowait(("all_ready",))

    def silent(self, name: str) -> None:
        self.words.put_nowait(("silent", name))

    def died(self, name: str, status: int, backoff_seconds: float) -> None:
        self.words.put_nowait(("died", name, status))

    def left(self, name: str) -> None:
        self.words.put_nowait(("left", name))

    def gave_up(self, name: str, status: int) -> None:
        self.words.put_nowait(("gave_up", name, status))

    def not_ready_in_time(self, names: Sequence[str], seconds: float) -> None:
        self.words.put_nowait(("late", *names))

    def stopping(self, names: Sequence[str]) -> None:
        self.words.put_nowait(("stopping", *names))

    def stopped(self, seconds: float) -> None:
        self.words.put_nowait(("stopped",))


def log_files(folder: Path, *specs: ProcessSpec) -> LogFiles:
    return LogFiles(folder, [one.name for one in specs], max_bytes=2**20, num_earlier=2)


def supervisor(
    heard: Heard, logs: Path, *specs: ProcessSpec, ready_timeout_seconds: float = 30
) -> Supervisor:
    async def says_up(probed: ProcessSpec) -> None:
        log = logs / f"{probed.name}.log"
        while log.read_text().count("up\n") < heard.num_starts[probed.name]:
            await asyncio.sleep(0.01)

    return Supervisor(
        specs,
        log_files(logs, *specs),
        heard,
        limits=replace(QUICK, ready_seconds=ready_timeout_seconds),
        probe=says_up,
    )


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def assert_dies(pid: int) -> None:
    """A killed process that is no child of this one takes the kernel a moment."""
    await eventually(lambda: not is_alive(pid))


async def test_up_and_down(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", SERVE), spec("b", SERVE))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    assert all(is_alive(pid) for pid in heard.pids.values())
    assert [os.getpgid(pid) for pid in heard.pids.values()] == list(heard.pids.values())
    cluster.request_stop()
    assert await heard.until("stopping") == ("stopping", "a", "b")
    assert await running == 0
    assert not any(is_alive(pid) for pid in heard.pids.values())
    assert (tmp_path / "a.log").read_text() == "up\n"


async def test_a_killed_process_comes_back_and_the_log_goes_on(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", SERVE), spec("b", SERVE))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    os.kill(heard.pids["a"], signal.SIGKILL)
    assert await heard.until("died") == ("died", "a", -9)
    assert await heard.until("ready") == ("ready", "a", True)
    assert is_alive(heard.pids["b"])
    assert (tmp_path / "a.log").read_text() == "up\nup\n"
    cluster.request_stop()
    assert await running == 0


async def test_a_process_comes_back_where_the_logs_were_deleted(tmp_path: Path) -> None:
    async def looks_fine(_spec: ProcessSpec) -> None:
        await asyncio.sleep(0.1)

    heard, logs = Heard(), tmp_path / "logs"
    logs.mkdir()
    specs = [spec("a", SERVE), spec("b", SERVE)]
    cluster = Supervisor(specs, log_files(logs, *specs), heard, limits=QUICK, probe=looks_fine)
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    shutil.rmtree(logs)
    os.kill(heard.pids["a"], signal.SIGKILL)
    assert await heard.until("ready") == ("ready", "a", True)
    assert is_alive(heard.pids["b"])
    cluster.request_stop()
    assert await running == 0


async def test_a_process_that_answers_nothing_is_killed(tmp_path: Path) -> None:
    async def looks_fine(_spec: ProcessSpec) -> None:
        await asyncio.sleep(0.1)

    async def is_stuck(asked: ProcessSpec) -> None:
        if asked.name != "a" or heard.num_starts["a"] > 1:
            await asyncio.Event().wait()

    heard = Heard()
    specs = [spec("a", SERVE), spec("b", SERVE)]
    cluster = Supervisor(
        specs,
        log_files(tmp_path, *specs),
        heard,
        limits=QUICK,
        probe=looks_fine,
        until_silent=is_stuck,
    )
    running = asyncio.create_task(cluster.run())
    assert await heard.until("silent") == ("silent", "a")
    assert await heard.until("died") == ("died", "a", -9)
    assert await heard.until("ready") == ("ready", "a", True)
    assert is_alive(heard.pids["b"])
    cluster.request_stop()
    assert await running == 0


async def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    """The process is tried again; the others go on."""
    heard, logs = Heard(), tmp_path / "logs"
    logs.mkdir()
    cluster = supervisor(heard, logs, spec("a", SERVE), spec("b", SERVE))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    (logs / "a.log").unlink()
    (logs / "a.log").mkdir()
    os.kill(heard.pids["a"], signal.SIGKILL)
    assert await heard.until("died") == ("died", "a", -9)
    assert await heard.until("died") == ("died", "a", 127)
    assert is_alive(heard.pids["b"])
    cluster.request_stop()
    assert await running == 0


async def test_a_process_that_somebody_else_asks_to_leave_comes_back(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", POLITE), spec("b", SERVE))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    os.kill(heard.pids["a"], signal.SIGTERM)
    assert await heard.until("left") == ("left", "a")
    assert await heard.until("ready") == ("ready", "a", True)
    assert (tmp_path / "a.log").read_text() == "up\nup\n"
    cluster.request_stop()
    assert await running == 0


async def test_a_deaf_process_is_killed_with_its_children(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", DEAF))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    child = int((tmp_path / "a.log").read_text().split()[1])
    assert is_alive(child)
    cluster.request_stop()
    assert await running == 0
    assert not is_alive(heard.pids["a"])
    await assert_dies(child)


async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", DEAF))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    cluster.request_stop()
    await heard.until("stopping")
    cluster.request_stop()
    await running
    assert not is_alive(heard.pids["a"])


async def test_what_a_dead_process_had_started_dies_before_the_restart(tmp_path: Path) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", DEAF))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    child = int((tmp_path / "a.log").read_text().split()[1])
    os.kill(heard.pids["a"], signal.SIGKILL)
    await heard.until("died")
    await assert_dies(child)
    cluster.request_stop()
    await running


async def test_wrong_settings_end_the_cluster_with_the_reason(tmp_path: Path) -> None:
    heard = Heard()
    wrong = spec("b", "import sys; print('no', flush=True); sys.exit(2)")
    cluster = supervisor(heard, tmp_path, spec("a", SERVE), wrong)
    assert await cluster.run() == 1
    assert await heard.until("gave_up") == ("gave_up", "b", 2)
    assert (tmp_path / "b.log").read_text() == "no\n"


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    heard = Heard()
    missing = ProcessSpec(
        name="a", role="router", address="127.0.0.1:1", command=("/no/such/program",)
    )
    assert await supervisor(heard, tmp_path, missing).run() == 1
    await heard.until("gave_up")
    assert "/no/such/program" in (tmp_path / "a.log").read_text()


async def test_a_cluster_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    heard = Heard()
    silent = spec("b", "import signal; signal.pause()")
    cluster = supervisor(heard, tmp_path, spec("a", SERVE), silent, ready_timeout_seconds=0.5)
    assert await cluster.run() == 1
    assert await heard.until("late") == ("late", "b")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_stop_it(tmp_path: Path, number: signal.Signals) -> None:
    heard = Heard()
    cluster = supervisor(heard, tmp_path, spec("a", SERVE))
    running = asyncio.create_task(cluster.run())
    await heard.until("all_ready")
    os.kill(os.getpid(), number)
    assert await running == 0


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from ctl.local.child import Child
from ctl.local.process_spec import ProcessSpec

async def main():
    spec = ProcessSpec(name="a", role="router", address="127.0.0.1:1",
                       command=(sys.executable, "-c", "import signal; signal.pause()"))
    child = await Child.start(spec, Path(sys.argv[1]))
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def test_children_die_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "a.log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        child = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert gone == [child]
    assert alive == []
