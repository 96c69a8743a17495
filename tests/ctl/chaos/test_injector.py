"""Faults done to processes, and undone; what is not a `ctl up` of ours is left alone."""

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from ctl.chaos import injector
from ctl.chaos.clients import Clients
from ctl.chaos.faults import read_scenario
from ctl.chaos.injector import Injected, Injector
from ctl.chaos.limits import no_new_descriptors, no_writes
from ctl.local.own_cluster import NotOurs, OwnCluster
from ctl.main import app
from loadgen.openai_stream import Target
from tests.eventually import eventually
from tests.free_ports import free_port

# Stands in for a router. A client says "open", or the path of a file to write to, and hears "done",
# or why that cannot be.
ROUTER = """
import os, socket, sys
port = int(sys.argv[sys.argv.index("--listen") + 1].rpartition(":")[2])
server = socket.create_server(("127.0.0.1", port))
while True:
    client, _ = server.accept()
    while path := client.recv(1000).decode():
        try:
            if path == "open":
                os.close(os.open(os.devnull, os.O_RDONLY))
            else:
                with open(path, "w") as file:
                    file.write("x")
            client.send(b"done")
        except OSError as error:
            client.send(error.strerror.encode())
    client.close()
"""


class Cluster:
    """Of one router, which is started again when it dies."""

    def __init__(self, folder: Path) -> None:
        (folder / "router.py").write_text(ROUTER)
        self.run_folder = folder / "epserve-x"
        self.run_folder.mkdir()
        self.token = self.run_folder / "cluster-token-1"
        self.token.write_text("word\n")
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        told = {"TMPDIR": self.run_folder, "EPSERVE_CLUSTER_TOKEN_FILE": self.token}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router", "--name", "router", "--listen", self.address],
            cwd=self._folder,
            env={"PYTHONPATH": str(self._folder), **{name: str(at) for name, at in told.items()}},
        )
        until = time.monotonic() + 60
        while self.state != psutil.STATUS_SLEEPING or not self.listens():
            assert time.monotonic() < until
            time.sleep(0.01)

    def listens(self) -> bool:
        return any(
            each.laddr.port == self.port for each in psutil.Process(self.pid).net_connections()
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def state(self) -> str:
        return psutil.Process(self.pid).status()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.process.kill()
    cluster.process.wait()


@pytest.fixture
def chaos(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Injector:
    async def serves(*_: object) -> None:
        await eventually(lambda: cluster.state == psutil.STATUS_SLEEPING and cluster.listens())

    monkeypatch.setattr(injector, "wait_until_ready", serves)
    monkeypatch.setattr(injector, "_SETTLE_SECONDS", 0.0)
    clients = Clients(target=Target.parse("http://127.0.0.1:9"), model="m", headers={})
    return Injector(OwnCluster.find(cluster.address), clients)


async def while_injected(chaos: Injector, text: str, look: Callable[[], bool]) -> list[Injected]:
    """What became of the faults; `look` has to hold while they last."""
    running = asyncio.create_task(chaos.run(read_scenario(text)))
    seen = asyncio.create_task(eventually(look))
    await asyncio.wait({running, seen}, return_when=asyncio.FIRST_COMPLETED)
    assert seen.done(), f"not seen during {text}"
    return await running


async def test_stopped_and_continued(cluster: Cluster, chaos: Injector) -> None:
    done = await while_injected(
        chaos, "0 stop router for 1", lambda: cluster.state == psutil.STATUS_STOPPED
    )
    assert [one.problem for one in done] == [""]
    await eventually(lambda: cluster.state == psutil.STATUS_SLEEPING)


async def test_killed_and_there_again(cluster: Cluster, chaos: Injector) -> None:
    before = cluster.pid

    async def supervise() -> None:
        await asyncio.to_thread(cluster.process.wait)
        cluster.start()

    supervising = asyncio.create_task(supervise())
    (one,) = await chaos.run(read_scenario("0 kill router"))
    await supervising
    assert one.problem == ""
    assert cluster.pid != before


async def test_who_does_not_come_back_is_told(
    cluster: Cluster, chaos: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(injector, "wait_until_ready", never)
    monkeypatch.setattr(injector, "RECOVERY_SECONDS", 0.1)
    (one,) = await chaos.run(read_scenario("0 stop router for 0.1"))
    assert one.problem == "router does not serve after 0.1 s"


async def test_faults_of_one_role_wait_for_each_other(cluster: Cluster, chaos: Injector) -> None:
    done = await chaos.run(read_scenario("0 stop router for 0.3\n0 full-disk router for 0.3"))
    first, second = sorted(done, key=lambda one: one.began)
    assert second.began >= first.over - 0.05


async def test_a_corrupted_token_is_whole_again(cluster: Cluster, chaos: Injector) -> None:
    whole = cluster.token.read_bytes()
    text = "0 corrupt-file for 0.5\n0 corrupt-file for 0.5"
    await while_injected(chaos, text, lambda: cluster.token.read_bytes() != whole)
    assert cluster.token.read_bytes() == whole


async def test_an_end_in_the_middle_undoes_everything(cluster: Cluster, chaos: Injector) -> None:
    running = asyncio.create_task(chaos.run(read_scenario("0 stop router for 600")))
    await eventually(lambda: cluster.state == psutil.STATUS_STOPPED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: cluster.state == psutil.STATUS_SLEEPING)


@pytest.mark.parametrize(
    ("limited", "wanted", "reason", "limit"),
    [
        (no_new_descriptors, "open", "Too many open files", resource.RLIMIT_NOFILE),
        (no_writes, "file", "File too large", resource.RLIMIT_FSIZE),
    ],
)
def test_limits(
    cluster: Cluster,
    tmp_path: Path,
    limited: Callable[[int], AbstractContextManager[None]],
    wanted: str,
    reason: str,
    limit: int,
) -> None:
    before = resource.prlimit(cluster.pid, limit)
    with cluster.connect() as client:

        def ask() -> str:
            client.sendall((wanted if wanted == "open" else str(tmp_path / wanted)).encode())
            return client.recv(100).decode()

        assert ask() == "done"
        with limited(cluster.pid):
            assert ask() == reason
        assert ask() == "done"
    assert resource.prlimit(cluster.pid, limit) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0 kill decode-0", "there is no decode-0"),
        ("0 partition router router-1 for 1", "there is no router-1"),
    ],
)
def test_what_a_cluster_does_not_have(chaos: Injector, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chaos.check(read_scenario(text))


def test_what_is_not_ours(cluster: Cluster, tmp_path: Path) -> None:
    assert OwnCluster.find(f"localhost:{cluster.port}").run_folder == cluster.run_folder
    for elsewhere in (f"127.0.0.1:{free_port()}", f"10.0.0.1:{cluster.port}"):
        with pytest.raises(NotOurs, match="no router of a `ctl up` of this user"):
            OwnCluster.find(elsewhere)
    result = CliRunner().invoke(app, ["chaos", "--router", f"10.0.0.1:{cluster.port}"])
    assert result.exit_code == 2


def test_who_connects_is_known_by_its_socket(cluster: Cluster) -> None:
    found = OwnCluster(cluster.run_folder)
    assert list(found.processes()) == ["router"]
    with cluster.connect() as client:
        client.sendall(b"open")
        assert client.recv(100) == b"done"  # it has accepted
        port = client.getsockname()[1]
        assert found.connected_from(cluster.port, port) == "router"
        assert found.connected_from(port, cluster.port) == ""  # this process is not of it
