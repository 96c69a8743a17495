"""What a bench reads of workers' metrics, as workers and their router serve them."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bench.cluster import figures_of_workers
from bench.serving.worker_metrics import (
    MetricsError,
    WorkerSamples,
    read_workers,
    start_figures,
    waiting_share,
)
from core.metrics import ProcessRegistry, serve
from engine.link.messages import RankStats, Ready
from engine.server.worker_metrics import WorkerMetrics
from proto.router_pb2 import GetProcessConfigResponse, ProcessConfig
from proto.worker_pb2 import ROLE_DECODE, ROLE_GATEWAY, ROLE_PREFILL, ROLE_ROUTER, ProcessIdentity
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

ROLES = {
    "gateway": ROLE_GATEWAY, "router": ROLE_ROUTER, "prefill": ROLE_PREFILL, "decode": ROLE_DECODE
}  # fmt: skip
SLOW = (("python", 2.0), ("group", 1.5), ("load", 30.0), ("graphs", 9.0))
QUICK = (("python", 2.5), ("group", 1.0), ("load", 31.0), ("graphs", 8.0))


class Worker:
    """Its metrics, as a worker of two ranks makes them."""

    def __init__(self, role: str) -> None:
        self.registry = ProcessRegistry(role=role)
        self.gaps = [0.0, 0.0]  # of each rank
        self._metrics = WorkerMetrics(self.registry, role, self._stats, self._ready)

    def steps(self, *seconds: float) -> None:
        self._metrics.observe(RankStats(step_seconds=seconds))

    def _stats(self) -> list[RankStats]:
        return [RankStats(step_gap_seconds_total=seconds) for seconds in self.gaps]

    def _ready(self) -> list[Ready]:
        return [
            Ready(
                rank=rank, device="cpu", pid=0, kv_fingerprint="f", page_tokens=4,
                max_model_len=64, pages_total=100, max_running=8, eos_token_ids=(2,),
                vocab_size=256, start_seconds=phases,
            )
            for rank, phases in enumerate((SLOW, QUICK))
        ]  # fmt: skip


Read = Callable[[], list[WorkerSamples]]


def process(role: str, port: int, error: str = "") -> ProcessConfig:
    identity = ProcessIdentity(name=f"{role}-0", role=ROLES[role], address="127.0.0.1:1")
    told = json.dumps({"metrics_port": port}) if not error else ""
    return ProcessConfig(identity=identity, config_json=told, error=error)


@pytest.fixture(scope="module")
def workers() -> dict[str, Worker]:
    """Of all tests: each looks at what changes within it."""
    return {role: Worker(role) for role in ("prefill", "decode")}


@pytest.fixture(scope="module")
def read(workers: dict[str, Worker]) -> Iterator[Read]:
    """Through a router that knows both, a gateway and itself."""
    others = [process("gateway", 0), process("router", 1)]
    with ExitStack() as stack:
        servers = {role: serve(0, worker.registry) for role, worker in workers.items()}
        for server in servers.values():
            stack.callback(server.close)
        told = [process(role, server.port) for role, server in servers.items()]
        admin = ScriptedAdmin(GetConfig=GetProcessConfigResponse(processes=[*others, *told]))
        router = stack.enter_context(admin_server(admin))
        yield lambda: read_workers(router)


def test_phases_of_a_start_are_of_the_slowest_rank(read: Read) -> None:
    decode, prefill = read()
    assert (decode.name, decode.decodes) == ("decode-0", True)
    assert (prefill.name, prefill.decodes) == ("prefill-0", False)
    figures = start_figures(prefill)
    assert {figure.unit for figure in figures} == {"s"}
    assert [(figure.metric, figure.value) for figure in figures] == [
        ("prefill-0 start, python", 2.5),
        ("prefill-0 start, group", 1.5),
        ("prefill-0 start, load", 31.0),
        ("prefill-0 start, graphs", 9.0),
        ("prefill-0 start, all but load", 12.5),  # the first rank's: 2 + 1.5 + 9
    ]


def test_waits_are_those_under_the_load(workers: dict[str, Worker], read: Read) -> None:
    decode = workers["decode"]
    decode.gaps[:] = [3.0, 1.0]  # so far, of other requests
    decode.steps(4.0)
    before = read()
    decode.gaps[:] = [3.25, 1.5]
    decode.steps(1.0, 2.0)
    workers["prefill"].steps(5.0)
    after = read()
    assert waiting_share(before[0], after[0]) == pytest.approx(0.75 / 3)
    shares = [each for each in figures_of_workers(before, after) if "start" not in each.metric]
    ((metric, unit, value),) = [(each.metric, each.unit, each.value) for each in shares]
    assert (metric, unit) == ("decode-0 waits between steps", "share")
    assert value == pytest.approx(0.25)


@pytest.mark.parametrize("steps", [(), (1.0, 2.0)])
def test_waits_that_nobody_measured_are_not_recorded(
    steps: tuple[float, ...],
    workers: dict[str, Worker],
    read: Read,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = read()
    workers["decode"].steps(*steps)
    figures = list(figures_of_workers(before, read()))
    assert len(figures) == 10
    assert all(" start, " in figure.metric for figure in figures)
    said = capsys.readouterr().out
    assert said == "decode-0 tells of no waits between steps: not recorded\n"


def test_a_worker_without_the_metrics_has_no_figures() -> None:
    empty = WorkerSamples(name="decode-0", decodes=True, samples=())
    assert waiting_share(empty, empty) is None
    assert start_figures(empty) == []


@pytest.mark.parametrize("told", [process("decode", -1), process("decode", 0, "it is gone")])
def test_a_worker_that_does_not_tell_is_an_error(told: ProcessConfig) -> None:
    admin = ScriptedAdmin(GetConfig=GetProcessConfigResponse(processes=[told]))
    with (
        admin_server(admin) as router,
        pytest.raises(MetricsError, match=f"decode-0: {told.error or 'its metrics have no port'}"),
    ):
        read_workers(router)
