"""The workers of one version are replaced by those of another, pair beside pair, under running
streams: forth, back, and forth again with a death. No request fails, and every stream is as it
would have been."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.process import pairing_version
from proto import worker_pb2
from tests.cluster.footprint import gateway_metric
from tests.cluster.harness import DEMO_MODEL, REPOSITORY, ClusterClient, wait_until
from tests.cluster.long_streams import StreamPool, long_streams
from tests.free_ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS = 12
NUM_TOKENS = 60
# Shorter than streams run: most of them are handed over, to workers of the other version.
GRACE_SECONDS = 0.3
ROLES = ("prefill", "decode")
NEXT_VERSION = "99.0"


def next_version(folder: Path) -> Path:
    """A copy of the packages that is another version, one whose workers cannot work with ours."""
    tree = folder / "next"
    for package in REPOSITORY.glob("*/__init__.py"):
        if package.parent.name not in ("tests", "demo_model"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package.parent, tree / package.parent.name, ignore=ignored)
    source = tree / Path(pairing_version.__file__).relative_to(REPOSITORY)
    before = f"PAIRING_VERSION = {pairing_version.PAIRING_VERSION}\n"
    assert before in source.read_text()
    after = f"PAIRING_VERSION = {pairing_version.PAIRING_VERSION + 1}\n"
    source.write_text(source.read_text().replace(before, after))
    metadata = tree / f"epserve-{NEXT_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: epserve\nVersion: {NEXT_VERSION}\n")
    return tree


class TwoVersions(ClusterClient):
    """A gateway, a router, and a place for a pair of workers of each version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(free_port(6))
        self._folder = folder
        self._trees = {"old": REPOSITORY, "new": next_version(folder)}
        places = [(version, role) for version in self._trees for role in ROLES]
        self._ports = {place: self.port + 2 + index for index, place in enumerate(places)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "TwoVersions":
        lists = [
            f"--{role}=" + ",".join(f"127.0.0.1:{self._ports[v, role]}" for v in self._trees)
            for role in ROLES
        ]
        self._start("router", "router", self.port + 1, *lists, "--silence-seconds=20")
        self._start("gateway", "gateway", self.port, f"--router={self.router}", *self._model())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(60)
            finally:
                process.kill()

    def start(self, version: str, role: str) -> None:
        """A worker; its name tells both."""
        flags = [*self._model(), "--threads=1", f"--stop-grace-seconds={GRACE_SECONDS}"]
        flags += ["--kv-pages=256", "--chunk-tokens=64"]
        self._start(
            f"{version}-{role}", f"{role}_worker", self._ports[version, role], *flags,
            tree=self._trees[version],
        )  # fmt: skip

    def end(self, version: str, role: str, number: signal.Signals) -> int:
        """Sends the signal; the exit status."""
        process = self._processes[f"{version}-{role}"]
        process.send_signal(number)
        return process.wait(120)

    def worker(self, version: str, role: str) -> worker_pb2.WorkerStatus | None:
        """What the router knows, of one that lives."""
        name = f"{version}-{role}"
        living = self._processes[name].poll() is None
        found = [one for one in self.status().workers if one.identity.name == name]
        return found[0] if living and found else None

    def is_paired(self, version: str, role: str) -> bool:
        """As the start probe of a pod asks it."""
        command = [sys.executable, "-m", "ctl", "probe", "pair", f"{version}-{role}"]
        asked = subprocess.run(
            [*command, "--router", self.router], cwd=REPOSITORY, check=False, capture_output=True
        )
        assert asked.returncode in (0, 1), asked.stderr
        return asked.returncode == 0

    def _model(self) -> list[str]:
        return [f"--model={DEMO_MODEL}", "--served-model-name=demo"]

    def _start(
        self, name: str, module: str, port: int, *flags: str, tree: Path = REPOSITORY
    ) -> None:
        command = [sys.executable, "-m", module, f"--name={name}", f"--listen=127.0.0.1:{port}"]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, *flags], cwd=tree, stdout=log, stderr=log,
                env=os.environ | {"UCX_NET_DEVICES": "lo"},
            )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TwoVersions]:
    with TwoVersions(tmp_path) as two:
        for role in ROLES:
            two.start("old", role)
        for role in ROLES:
            wait_until(lambda role=role: two.is_paired("old", role), 300, f"{role} has a partner")
        wait_until(lambda: two.client.get("/ready").is_success, 60, "the gateway is ready")
        two.learn_model()
        yield two


class Replacement:
    """One version's workers for the other's, a role at a time, while `pool` runs."""

    def __init__(self, cluster: TwoVersions, pool: StreamPool, before: str, after: str) -> None:
        self._cluster = cluster
        self._pool = pool
        self._before = before
        self._after = after

    def come(self, *roles: str) -> None:
        """The new ones, in this order; the first is alone for some time and serves nobody."""
        first, second = roles
        self._cluster.start(self._after, first)
        wait_until(lambda: self._is_ready(first), 300, f"{self._after} {first} is ready")
        self._let_streams_end("beside a lone worker")
        assert not self._cluster.is_paired(self._after, first)
        (rejected,) = self._cluster.status().rejected
        assert rejected.identity.name == f"{self._after}-{first}"
        assert "it differs from" in rejected.reason
        assert "in pairing version" in rejected.reason
        assert self._seen(self._after, first).num_accepted_total == 0
        self._cluster.start(self._after, second)
        for role in roles:
            wait_until(
                lambda role=role: self._cluster.is_paired(self._after, role), 300, f"{role} is up"
            )
        wait_until(lambda: self._serves(first) and self._serves(second), 300, "both versions serve")
        assert not self._cluster.status().rejected

    def go(self, *roles: str, first_signal: signal.Signals = signal.SIGTERM) -> None:
        """The old ones, in this order."""
        for role, number in zip(roles, (first_signal, signal.SIGTERM), strict=True):
            status = self._cluster.end(self._before, role, number)
            assert status == (0 if number == signal.SIGTERM else -number)
            self._let_streams_end(f"without the {self._before} {role} worker")

    def _seen(self, version: str, role: str) -> worker_pb2.WorkerStatus:
        found = self._cluster.worker(version, role)
        assert found is not None, f"{version} {role} is gone"
        return found

    def _is_ready(self, role: str) -> bool:
        found = self._cluster.worker(self._after, role)
        return found is not None and found.ready

    def _serves(self, role: str) -> bool:
        return self._seen(self._after, role).num_accepted_total > 0

    def _let_streams_end(self, when: str) -> None:
        tally = self._pool.tally
        enough = tally.num_complete + NUM_STREAMS
        wait_until(lambda: tally.num_complete >= enough or tally.faults, 300, f"streams {when}")
        assert not tally.faults, f"{when}: {tally.faults[:3]}"


def replace_all(cluster: TwoVersions, pool: StreamPool) -> None:
    tally = pool.tally
    wait_until(lambda: tally.num_running > NUM_STREAMS // 2, 120, "streams run")
    forth = Replacement(cluster, pool, "old", "new")
    forth.come("decode", "prefill")
    versions = {one.identity.version for one in cluster.status().workers}
    assert NEXT_VERSION in versions
    assert len(versions) == 2
    forth.go("decode", "prefill")
    back = Replacement(cluster, pool, "new", "old")
    back.come("prefill", "decode")
    back.go("prefill", "decode")
    again = Replacement(cluster, pool, "old", "new")
    again.come("decode", "prefill")
    # Its prompts are computed anew by the other version, and decode beside it goes on alone.
    again.go("prefill", "decode", first_signal=signal.SIGKILL)


async def play(cluster: TwoVersions) -> dict[str, Any]:
    streams = long_streams(NUM_STREAMS, cluster.model, num_tokens=NUM_TOKENS, prompt_tokens=150)
    pool = StreamPool(streams, cluster.url)
    try:
        await pool.learn()
        running = asyncio.create_task(pool.run())
        try:
            await asyncio.to_thread(replace_all, cluster, pool)
        finally:
            pool.stop.set()
            await running
    finally:
        await pool.close()
    tally = pool.tally
    assert not tally.faults, f"{len(tally.faults)} of {tally.num_complete}: {tally.faults[:5]}"
    await asyncio.to_thread(cluster.assert_nothing_held)
    return {
        "complete and equal": tally.num_complete,
        "failed": len(tally.faults),
        "told to come back": tally.num_told_to_wait + tally.num_turned_away,
        "moved choices": int(gateway_metric(cluster, "epserve_gateway_moves_total")),
        "longest stream (s)": round(tally.longest_seconds, 1),
    }


def test_versions_replace_each_other(
    cluster: TwoVersions, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = asyncio.run(play(cluster))
    with capsys.disabled():
        sys.stdout.write(f"\ntwo versions: {numbers}\n")
    assert numbers["told to come back"] == 0
    assert numbers["moved choices"] > 0
