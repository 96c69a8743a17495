"""The CPU demo as the chart renders it, run for real: its own command lines and probes, routers
that find workers through an API server, and the release's own test."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.deploy.chart import CHART, EXAMPLES, PodTemplate, load, overlaid, pod_templates, render
from tests.deploy.small_kubelet import MODEL, RunningPod
from tests.router.fake_kubernetes import FakeKubernetes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def templates() -> dict[str, PodTemplate]:
    values = load(EXAMPLES / "values-cpu-demo.yaml")
    values = overlaid(values, "workers", "common", "settings", "kv-pages", value=64)
    return {pod.component: pod for pod in pod_templates(render(values))}


@asynccontextmanager
async def release(api: FakeKubernetes, folder: Path) -> AsyncIterator[dict[str, RunningPod]]:
    """One pod of each component. Only workers are known to the API: all that routers look for."""
    found = templates()
    # Ports are the chart's own: the addresses must be nobody else's.
    network = f"127.{10 + os.getpid() % 240}.{os.getpid() // 240 % 250}"
    ips = {name: f"{network}.{i}" for i, name in enumerate(found, start=1)}
    replaced = {
        "/opt/epserve/demo_model": str(MODEL),
        "--router=epserve-router:": f"--router={ips['router']}:",
        "/etc/epserve/cluster/cluster-token": str(folder / "cluster-token"),
    }
    (folder / "cluster-token").write_text("a-word-of-the-cluster")
    pods = {
        name: RunningPod(pod, f"{name}-0", ips[name], folder / f"{name}.log", replaced)
        for name, pod in found.items() if name != "smoke-test"
    }  # fmt: skip
    try:
        for name, pod in pods.items():
            more = [f"--kubernetes-api={api.url}"] if name == "router" else []
            await pod.start(*more)
        yield pods
    finally:
        await asyncio.gather(*(pod.stop() for pod in pods.values()))


async def smoke_test(pod: PodTemplate, url: str) -> tuple[int | None, str]:
    """What `helm test` runs; its exit status and what it said."""
    args = [arg for arg in pod.container["args"] if not arg.startswith("http")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, CHART / "files" / "smoke_test.py", url, *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_cpu_demo_becomes_ready_serves_and_ends(tmp_path: Path) -> None:
    async with FakeKubernetes(namespace="serving") as api, release(api, tmp_path) as pods:
        for role in ("prefill", "decode"):
            labels = pods[role].pod.labels
            api.create(pods[role].name, ip=pods[role].ip, port=9000, labels=labels)
        for role in ("prefill", "decode"):
            await pods[role].wait_for("startupProbe")
            await pods[role].wait_for("readinessProbe")
            api.modify(pods[role].name, ready=True)
        await pods["router"].wait_for("readinessProbe")
        await pods["gateway"].wait_for("readinessProbe")
        url = f"http://{pods['gateway'].ip}:8000"
        status, said = await smoke_test(templates()["smoke-test"], url)
        assert (status, "epserve-demo says" in said) == (0, True), said

        assert await pods["decode"].run_pre_stop() == 0, pods["decode"].log.read_text()
        assert not await pods["decode"].answers("readinessProbe")
        for pod in pods.values():
            await pod.wait_for("livenessProbe")
        assert await asyncio.gather(*(pod.stop() for pod in pods.values())) == [0, 0, 0, 0]
