"""The flags that the chart passes, as the processes themselves read them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core.address import parse_address
from core.settings import ProcessSettings
from engine.process.settings import WorkerSettings
from gateway.base.settings import GatewaySettings
from router.settings import RouterSettings
from tests.deploy.chart import (
    EXAMPLES,
    Object,
    PodTemplate,
    case,
    long_lived,
    pod_templates,
    values_files,
)

SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "prefill_worker": WorkerSettings,
    "decode_worker": WorkerSettings,
}
# What the kubelet and the controllers of groups fill in.
VARIABLES = {
    "POD_NAME": "decode-0-1", "POD_NAMESPACE": "serving", "POD_IP": "10.1.2.3",
    "LWS_GROUP_SIZE": "9", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "decode-0.decode.serving",
    "GROUP_NAME": "decode", "GROUP_INDEX": "0",
}  # fmt: skip

FILES = pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
Parse = Callable[[PodTemplate], ProcessSettings]


def expanded(arg: str) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: VARIABLES[match[1]], arg)


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Settings of a pod's process. Files that are mounted in the pod lie in `tmp_path` here."""
    names = ("config.json", "tokenizer.json", "api-keys", "admin-token", "tls.crt", "tls.key")
    for name in (*names, "cluster-token", "ca.crt"):
        (tmp_path / name).write_text("{}")

    def parse_pod(pod: PodTemplate) -> ProcessSettings:
        mounts = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        args = []
        for arg in map(expanded, pod.container["args"]):
            flag, _, value = arg.partition("=")
            if flag == "--model":
                assert value in mounts or value == "/opt/epserve/demo_model"
                arg = f"{flag}={tmp_path}"
            elif value.startswith("/"):
                assert str(Path(value).parent) in mounts
                arg = f"{flag}={tmp_path / Path(value).name}"
            args.append(arg)
        for one in pod.container["env"]:
            if "_CLUSTER" not in one["name"]:
                continue
            if (value := one["value"]).startswith("/"):
                assert str(Path(value).parent) in mounts
                value = str(tmp_path / Path(value).name)
            monkeypatch.setenv(one["name"], value)
        (module,) = pod.container["command"][2:]
        assert pod.container["command"][:2] == ["python", "-m"]
        return SETTINGS[module].parse(args)

    return parse_pod


def processes(path: Path) -> dict[str, PodTemplate]:
    found = {pod.component: pod for pod in pod_templates(case(path))}
    return {name: pod for name, pod in found.items() if name != "smoke-test"}


@FILES
def test_every_flag_exists_and_takes_its_value(path: Path, parse: Parse) -> None:
    found = {name: parse(pod) for name, pod in processes(path).items()}
    wanted = {"gateway": GatewaySettings, "router": RouterSettings}
    assert {name: type(settings) for name, settings in found.items()} == {
        name: wanted.get(name, WorkerSettings) for name in long_lived(path)
    }
    traced = path.stem == "everything-values"
    for settings in found.values():
        assert settings.advertise == "10.1.2.3"
        assert settings.otlp_endpoint == ("collector.monitoring:4317" if traced else "")
        assert settings.trace_sample_ratio == (0.05 if traced else 1)


@FILES
def test_ports_are_those_the_processes_listen_on(path: Path, parse: Parse) -> None:
    objects = case(path)
    for name, pod in processes(path).items():
        settings = parse(pod)
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        host, port = parse_address(settings.listen)
        any_host = "::" if path.stem == "everything-values" else "0.0.0.0"
        assert (host, port) == (any_host, ports["http" if name == "gateway" else "grpc"])
        assert settings.metrics_port == ports["metrics"]
        if isinstance(settings, WorkerSettings) and settings.nodes > 1:
            assert parse_address(settings.rendezvous).port == ports["rendezvous"]
        if isinstance(settings, GatewaySettings):
            (router,) = settings.router
            service_name, service_port = parse_address(router)
            (service,) = [
                each for each in objects
                if each["kind"] == "Service" and each["metadata"]["name"] == service_name
            ]  # fmt: skip
            assert [one["port"] for one in service["spec"]["ports"]] == [service_port]
            # The name leads to every router, else a gateway would know one of them only.
            assert service["spec"]["clusterIP"] == "None"


@FILES
def test_routers_find_exactly_the_workers(path: Path, parse: Parse) -> None:
    found = processes(path)
    if "router" not in found:
        found |= {"router": processes(EXAMPLES / "values-two-nodes-16-gpu.yaml")["router"]}
    router = parse(found["router"])
    assert isinstance(router, RouterSettings)
    if router.discovery == "dns":
        services = {
            f"{each['metadata']['name']}.serving.svc:{each['spec']['ports'][0]['port']}"
            for each in case(path) if each["kind"] == "Service"
        }  # fmt: skip
        assert {*router.prefill_dns, *router.decode_dns} <= services
        return
    assert router.kubernetes_namespace == "serving"
    selectors = {"prefill": router.prefill_selector, "decode": router.decode_selector}
    for role, selector in selectors.items():
        wanted = dict(part.split("=") for part in selector.split(","))
        # Of this release, and of those that have joined it: others in the namespace have workers,
        # too.
        assert wanted["app.kubernetes.io/part-of"] == "epserve"
        matched = {name for name, pod in found.items() if wanted.items() <= pod.labels.items()}
        assert matched == {role}
        assert "grpc" in {port["name"] for port in found[role].container["ports"]}


@FILES
def test_variables_that_are_used_are_set(path: Path) -> None:
    for pod in processes(path).values():
        given = {one["name"] for one in pod.container["env"]}
        if pod.owner["kind"] in ("LeaderWorkerSet", "DisaggregatedSet"):
            given |= {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}
        used = {name for arg in pod.container["args"] for name in re.findall(r"\$\((\w+)\)", arg)}
        assert used <= given
        # They would be taken for settings of the process.
        others = {name for name in given if "_CLUSTER" not in name}
        assert not [name for name in others if name.startswith("EPSERVE_")]


@FILES
def test_groups_over_nodes_know_their_place(path: Path, parse: Parse) -> None:
    for pod in processes(path).values():
        settings = parse(pod)
        if isinstance(settings, WorkerSettings):
            assert (settings.nodes > 1) == (pod.num_pods > 1)
            if settings.nodes > 1:
                assert settings.node_rank == 1
                assert settings.expert_group == "decode-0"


@FILES
def test_no_process_is_killed_while_it_loads(path: Path, parse: Parse) -> None:
    def patience(probe: Object) -> float:
        return float(probe["periodSeconds"] * probe["failureThreshold"])

    for pod in processes(path).values():
        settings = parse(pod)
        if isinstance(settings, WorkerSettings):
            # The process gives up first, and says why.
            assert patience(pod.container["startupProbe"]) > settings.start_timeout_seconds + 30
            assert "liveness" in str(pod.container["livenessProbe"])
        assert patience(pod.container["livenessProbe"]) >= 60
