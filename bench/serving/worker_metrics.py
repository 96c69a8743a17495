"""What workers say of themselves at /metrics that no client sees: how long the phases of their
start took, and how long devices waited between steps.

before = read_workers(router)
...                                           # load
for was, worker in zip(before, read_workers(router), strict=True):
    start_figures(worker)
    waiting_share(was, worker)
"""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ctl.admin.connection import Target, connect
from loadgen.summary import Figure
from proto.router_pb2 import GetProcessConfigRequest, GetProcessConfigResponse, ProcessConfig
from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL

START = "epserve_start_seconds"
GAPS = "epserve_step_gap_seconds_total"
STEPS = "epserve_step_seconds_sum"
LOAD = "load"
_ANSWER_SECONDS = 10.0


class MetricsError(Exception):
    """A worker does not tell where its metrics are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSamples:
    """All samples of one worker at one time."""

    name: str
    decodes: bool
    samples: tuple[Sample, ...]

    def of(self, metric: str) -> Iterator[Sample]:
        return (sample for sample in self.samples if sample.name == metric)

    def total(self, metric: str) -> float | None:
        """Sum over all labels; None where there is no such metric."""
        values = [sample.value for sample in self.of(metric)]
        return sum(values) if values else None


def read_workers(router: str) -> list[WorkerSamples]:
    """Of all workers that this router knows, by name. Raises MetricsError, or OSError or
    EpserveError where one does not answer."""
    reply = asyncio.run(_ask(router))
    workers = [
        _read(process)
        for process in reply.processes
        if process.identity.role in (ROLE_PREFILL, ROLE_DECODE)
    ]
    return sorted(workers, key=lambda worker: worker.name)


async def _ask(router: str) -> GetProcessConfigResponse:
    async with connect(Target(router=router)) as admin:
        return await admin.call(admin.stub.GetConfig, GetProcessConfigRequest(), _ANSWER_SECONDS)


def _read(process: ProcessConfig) -> WorkerSamples:
    name, host = process.identity.name, process.identity.address.rpartition(":")[0]
    port = json.loads(process.config_json or "{}").get("metrics_port", 0)
    if port <= 0:
        raise MetricsError(f"{name}: {process.error or 'its metrics have no port'}")
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=_ANSWER_SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = tuple(sample for family in families for sample in family.samples)
    return WorkerSamples(name=name, decodes=process.identity.role == ROLE_DECODE, samples=samples)


def start_figures(worker: WorkerSamples) -> list[Figure]:
    """Of the slowest rank: each phase, and all but loading together. None where it does not
    tell."""
    phases: dict[str, float] = {}
    others: dict[str, float] = {}  # by rank
    for sample in worker.of(START):
        rank, phase = sample.labels["rank"], sample.labels["phase"]
        phases[phase] = max(sample.value, phases.get(phase, 0.0))
        if phase != LOAD:
            others[rank] = others.get(rank, 0.0) + sample.value
    if others:
        phases["all but load"] = max(others.values())
    return [Figure(f"{worker.name} start, {name}", "s", value) for name, value in phases.items()]


def waiting_share(before: WorkerSamples, after: WorkerSamples) -> float | None:
    """Of the time that steps took between both, the part in which devices had work and nothing to
    do. None where no step, or no wait at all was measured: devices that never wait a microsecond
    are devices without a measurement.

    Where steps overlap with the host, as they do on GPUs, a step is counted from the end of the
    one before it: waits are part of it.
    """
    steps, gaps = (
        (after.total(metric) or 0.0) - (before.total(metric) or 0.0) for metric in (STEPS, GAPS)
    )
    return gaps / steps if steps > 0 and gaps > 0 else None
