"""What a kubelet makes of a pod template, on one machine: a process with the pod's own command
line, environment and probes, at an address of its own (127.x.y.z)."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.client import channel
from tests.deploy.chart import ROOT, PodTemplate

MODEL = ROOT / "demo_model" / "checkpoint"
START_SECONDS = 240.0


class RunningPod:
    """One pod. `replaced` are texts in its arguments that a cluster's DNS and image stand for."""

    def __init__(
        self, pod: PodTemplate, name: str, ip: str, log: Path, replaced: dict[str, str]
    ) -> None:
        self.pod = pod
        self.name = name
        self.ip = ip
        self.log = log
        # Pods of one node share its ports here.
        self._replaced = {"--listen=0.0.0.0:": f"--listen={ip}:", **replaced}
        self.process: asyncio.subprocess.Process | None = None
        self._given: dict[str, str] = {}

    def _here(self, text: str) -> str:
        for before, after in self._replaced.items():
            text = text.replace(before, after)
        return text

    async def start(self, *more: str) -> None:
        container = self.pod.container
        fields = {
            "metadata.name": self.name, "metadata.namespace": "serving", "status.podIP": self.ip,
        }  # fmt: skip
        given = self._given = {
            one["name"]: self._here(one["value"]) if "value" in one
            else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }  # fmt: skip
        args = [
            self._here(re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], arg))
            for arg in container["args"]
        ]
        program, *rest = container["command"]
        assert program == "python"
        environment = os.environ | given | {"HOME": str(self.log.parent), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *rest, *args, *more,
                cwd=ROOT, env=environment, stdout=output, stderr=output,
            )  # fmt: skip

    async def wait_for(self, probe: str) -> None:
        """Until the probe succeeds. AssertionError with the log when the process ends."""
        assert self.process is not None
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not await self.answers(probe):
            assert self.process.returncode is None, f"{self.name}: {self.log.read_text()[-3000:]}"
            waited = asyncio.get_running_loop().time() < deadline
            assert waited, f"{self.name} has no {probe}: {self.log.read_text()[-3000:]}"
            await asyncio.sleep(0.1)

    async def answers(self, probe: str) -> bool:
        """One try of the pod's startupProbe, readinessProbe or livenessProbe."""
        asked = self.pod.container[probe]
        seconds = asked.get("timeoutSeconds", 1)
        if "grpc" in asked:
            return await self._grpc(asked["grpc"], seconds)
        if "exec" in asked:
            return await self._exec(asked["exec"]) == 0
        ports = {port["name"]: port["containerPort"] for port in self.pod.container["ports"]}
        url = f"http://{self.ip}:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
        async with httpx.AsyncClient(timeout=seconds) as client:
            try:
                return (await client.get(url)).status_code == 200
            except httpx.HTTPError:
                return False

    async def _grpc(self, asked: dict[str, Any], seconds: float) -> bool:
        request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
        async with channel(f"{self.ip}:{asked['port']}") as peer:
            try:
                reply = await health_pb2_grpc.HealthStub(peer).Check(request, timeout=seconds)
            except grpc.aio.AioRpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def run_pre_stop(self) -> int:
        """The exit status of the pod's preStop command."""
        return await self._exec(self.pod.container["lifecycle"]["preStop"]["exec"])

    async def _exec(self, asked: dict[str, Any]) -> int:
        """The exit status of a command, run beside the pod's process."""
        *command, script = asked["command"]
        script = self._here(script)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, script, cwd=ROOT, stdout=output, stderr=output,
                env=os.environ | self._given | {"PATH": path, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            return await process.wait()

    async def stop(self) -> int:
        """As at the end of a pod; its exit status. SIGKILL after its grace, or when not started."""
        if self.process is None:
            return 0
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            grace = self.pod.template["spec"]["terminationGracePeriodSeconds"]
            try:
                return await asyncio.wait_for(self.process.wait(), grace)
            except TimeoutError:
                self.process.kill()
        return await self.process.wait()
