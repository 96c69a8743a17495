"""What no schema says: objects that fit each other, and none that gets in another's way."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctl.admin.port_forward import INSTANCE_LABEL, SELECTOR
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    Object,
    PodTemplate,
    case,
    load,
    long_lived,
    overlaid,
    pod_templates,
    render,
    script,
    values_files,
)

FILES = pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
LONG_LIVED = ("gateway", "router", "prefill", "decode")
# Controllers append this much at most to the name of a group: "-0-1234567890-prefill-99-99".
MAX_BASE = 28


def of_kind(objects: tuple[Object, ...] | list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Does a label selector, in either of its forms, match?"""
    plain = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in plain.items())


@FILES
def test_selectors_match_the_pods_they_are_for(path: Path) -> None:
    objects = case(path)
    pods = {pod.component: pod for pod in pod_templates(objects)}
    for each in objects:
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = each.get("spec", {})
        if each["kind"] in ("Service", "PodDisruptionBudget", "Deployment"):
            selector = spec["selector"].get("matchLabels", spec["selector"])
        elif each["kind"] == "NetworkPolicy":
            selector = spec["podSelector"]["matchLabels"]
        else:
            continue
        matched = {name for name, pod in pods.items() if selects(selector, pod.labels)}
        assert matched == {component}, each["metadata"]["name"]
        assert not any("version" in key or "chart" in key for key in selector)
    for monitor in of_kind(objects, "PodMonitor"):
        selector = monitor["spec"]["selector"]
        assert {n for n, pod in pods.items() if selects(selector, pod.labels)} >= set(
            long_lived(path)
        )


@FILES
def test_spread_constraints_and_ports_are_of_the_pod_itself(path: Path) -> None:
    objects = case(path)
    for pod in pod_templates(objects):
        spec = pod.template["spec"]
        for constraint in spec.get("topologySpreadConstraints", ()):
            assert selects(constraint["labelSelector"], pod.labels)
        ports = {port["name"]: port["containerPort"] for port in pod.container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how, what in pod.container.get(probe, {}).items():
                if how == "httpGet":
                    assert what["port"] in ports
                elif how == "grpc":
                    assert what["port"] == ports["grpc"]
        for service in of_kind(objects, "Service"):
            if selects(service["spec"]["selector"], pod.labels):
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
    for monitor in of_kind(objects, "PodMonitor"):
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} == {"metrics"}


@FILES
def test_every_long_lived_pod_is_careful(path: Path) -> None:
    found = {pod.component: pod for pod in pod_templates(case(path))}
    assert set(long_lived(path)) <= set(found)
    for component, pod in found.items():
        spec, container = pod.template["spec"], pod.container
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] in (False, component == "router")
        assert spec["serviceAccountName"].endswith("-router") == (component == "router")
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        downloads = [one for one in spec.get("initContainers", ()) if one["name"] == "download"]
        for one in [container, *downloads]:
            own = one["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            assert set(own["capabilities"].get("add", ())) <= {"IPC_LOCK", "SYS_PTRACE"}
            assert one["resources"]["requests"]
            assert one["resources"]["limits"]["memory"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts <= {volume["name"] for volume in spec["volumes"]}
        if component in LONG_LIVED:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert container["lifecycle"]["preStop"]
            assert container["livenessProbe"] != container["readinessProbe"]


@FILES
def test_pods_have_longer_than_their_drain(path: Path) -> None:
    for pod in pod_templates(case(path)):
        texts = [arg for arg in pod.container["args"] if re.match("--(stop-)?grace-seconds=", arg)]
        for text in texts:
            drain = float(text.partition("=")[2])
            hook = pod.container["lifecycle"]["preStop"]
            pause = hook["sleep"]["seconds"] if "sleep" in hook else 0
            assert pod.template["spec"]["terminationGracePeriodSeconds"] >= drain + pause + 15
            if "exec" in hook:
                assert f"--wait --timeout={drain + 10:g} " in hook["exec"]["command"][-1]
        assert texts or pod.component not in ("gateway", "prefill", "decode")


@FILES
def test_labels_of_every_object(path: Path) -> None:
    for each in case(path):
        labels = each["metadata"]["labels"]
        names = ("name", "instance", "version", "component", "part-of", "managed-by")
        assert {f"app.kubernetes.io/{name}" for name in names} | {"helm.sh/chart"} <= set(labels)
        assert each["metadata"]["namespace"] == script.NAMESPACE
    for pod in pod_templates(case(path)):
        # Else a new version of the chart restarted every worker.
        assert ("helm.sh/chart" in pod.labels) == (pod.owner["kind"] == "Pod")
        for role in pod.owner["spec"].get("roles", ()):
            assert "helm.sh/chart" not in role["metadata"]["labels"]


@FILES
def test_no_replicas_where_an_autoscaler_has_the_say(path: Path) -> None:
    objects = case(path)
    targets = [
        each["spec"]["scaleTargetRef"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject") for each in of_kind(objects, kind)
    ]  # fmt: skip
    scaled = {(target["kind"], target["name"]) for target in targets}
    assert len(scaled) == len(targets)
    for each in objects:
        if each["kind"] in ("Deployment", "LeaderWorkerSet"):
            owned = (each["kind"], each["metadata"]["name"]) in scaled
            assert ("replicas" in each["spec"]) == (not owned)
            scaled.discard((each["kind"], each["metadata"]["name"]))
        for role in each.get("spec", {}).get("roles", ()):
            key = ("DisaggregatedSetRoleScaler", f"{each['metadata']['name']}-{role['name']}")
            assert ("replicas" in role["spec"]) == (key not in scaled)
            assert (role.get("scaling") == {"mode": "External"}) == (key in scaled)
            scaled.discard(key)
    assert scaled == set(), "autoscalers of nothing"


def test_autoscalers_wait_longer_than_a_drain() -> None:
    for path in values_files():
        behaviours = [
            each["spec"].get("behavior")
            or each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            for each in case(path) if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
        ]  # fmt: skip
        drains = [
            int(arg.partition("=")[2]) for pod in pod_templates(case(path))
            for arg in pod.container["args"] if arg.startswith("--stop-grace-seconds=")
        ]  # fmt: skip
        for behaviour in behaviours:
            assert behaviour["scaleDown"]["stabilizationWindowSeconds"] >= max(drains)


def _names(release: str, namespace: str = "n") -> set[tuple[str, str]]:
    values = load(CHART / "ci" / "everything-values.yaml") | {"fullnameOverride": ""}
    found = render(values, name=release, namespace=namespace)
    keys = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(keys) == len(set(keys)), "two objects of one name"
    return set(keys)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        ("epserve", "epserve-epserve"),
        ("x", "x-router"),
        ("x", "x-prefill"),
        ("a" * 52 + "b", "a" * 52 + "c"),
        ("a" * 28, "a" * 29),
        ("production-models-deepseek-v3-a", "production-models-deepseek-v3-b"),
    ],
)
def test_two_releases_never_collide(one: str, other: str) -> None:
    assert not _names(one) & _names(other)


def test_no_component_ends_like_another() -> None:
    suffixes = {name.removeprefix("r-") for _, name in _names("r")}
    for one, other in itertools.permutations(suffixes, 2):
        assert not one.endswith(f"-{other}")


def test_names_leave_room_for_what_controllers_append() -> None:
    for release in ("a" * 53, "a-" * 26 + "a"):
        for pod in pod_templates(render({}, name=release)):
            base = pod.owner["metadata"]["name"].removesuffix(f"-{pod.component}")
            assert len(base) <= MAX_BASE
            assert pod.labels["app.kubernetes.io/instance"] == release


def test_one_worker_template_serves_both_roles() -> None:
    """With equal values the pods differ in the role alone."""
    pods = {pod.component: pod for pod in pod_templates(render({}))}
    texts = [
        yaml.safe_dump(pods[role].template).replace(role, "ROLE") for role in ("prefill", "decode")
    ]
    assert texts[0] == texts[1]


def test_roles_have_the_last_word_over_what_is_common() -> None:
    values: dict[str, Any] = {"workers": {"common": {"ranks": 2, "settings": {"max-waiting": 5}}}}
    values = overlaid(values, "workers", "decode", "settings", value={"max-running": 9})
    values = overlaid(values, "workers", "decode", "ranks", value=4)
    pods = {pod.component: pod.container["args"] for pod in pod_templates(render(values))}
    assert {"--ranks=2", "--max-waiting=5"} <= set(pods["prefill"])
    assert {"--ranks=4", "--max-waiting=5", "--max-running=9"} <= set(pods["decode"])
    assert "--max-running=9" not in pods["prefill"]


def test_large_numbers_are_written_out() -> None:
    values = overlaid({}, "gateway", "settings", value={"max-body-bytes": 123456789})
    (gateway,) = [pod for pod in pod_templates(render(values)) if pod.component == "gateway"]
    assert "--max-body-bytes=123456789" in gateway.container["args"]


def test_gpus_and_rdma_devices() -> None:
    found = {p.component: p for p in pod_templates(case(EXAMPLES / "values-96-gpu.yaml"))}
    for role, num_pods in (("prefill", 4), ("decode", 9)):
        assert found[role].num_pods == num_pods
        limits = found[role].container["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("8", "8")
        requests = found[role].container["resources"]["requests"]
        assert (requests["nvidia.com/gpu"], requests["cpu"]) == ("8", "36")
        assert found[role].container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        volumes = {volume["name"]: volume for volume in found[role].template["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        annotations = found[role].owner["metadata"]["annotations"]
        assert "leaderworkerset.sigs.k8s.io/exclusive-topology" in annotations


def test_keys_that_change_restart_what_holds_them() -> None:
    def checksums(lines: str) -> list[str]:
        values = overlaid({}, "gateway", "apiKeys", value={"lines": lines})
        return [
            pod.template["metadata"]["annotations"].get("checksum/api-keys", "")
            for pod in pod_templates(render(values)) if pod.component in LONG_LIVED
        ]  # fmt: skip

    one, other = checksums("sk-a"), checksums("sk-b")
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, True, True, True]


class TestNetworkPolicy:
    """Who may reach whom, asked of the policies as a network would."""

    def allowed(self, path: Path, source: str | None, target: str, port: int) -> bool:
        objects = case(path)
        pods = {pod.component: pod for pod in pod_templates(objects)}
        policies = [
            each["spec"] for each in of_kind(objects, "NetworkPolicy")
            if selects(each["spec"]["podSelector"], pods[target].labels)
        ]  # fmt: skip
        assert policies
        labels = pods[source].labels if source else {}
        return any(
            self.has_port(rule, port) and self.has_peer(rule, labels)
            for policy in policies for rule in policy["ingress"]
        )  # fmt: skip

    def has_port(self, rule: Object, port: int) -> bool:
        return any(
            one["protocol"] == "TCP" and one["port"] <= port <= one.get("endPort", one["port"])
            for one in rule["ports"]
        )

    def has_peer(self, rule: Object, labels: dict[str, str]) -> bool:
        if "from" not in rule:
            return True
        ours = [peer["podSelector"] for peer in rule["from"] if "podSelector" in peer]
        return any(labels and selects(selector, labels) for selector in ours)

    @pytest.mark.parametrize("name", ["cpu-demo", "96-gpu"])
    def test_everything_the_request_path_needs(self, name: str) -> None:
        path = EXAMPLES / f"values-{name}.yaml"
        ways = [
            ("gateway", "router", 8001), ("router", "prefill", 9000), ("router", "decode", 9000),
            ("gateway", "decode", 9000), ("decode", "prefill", 9000), ("prefill", "decode", 40000),
            ("decode", "prefill", 40000), ("decode", "decode", 9400), ("decode", "decode", 50000),
            ("smoke-test", "gateway", 8000),
        ]  # fmt: skip
        assert [way for way in ways if not self.allowed(path, *way)] == []

    @pytest.mark.parametrize("name", ["cpu-demo", "96-gpu"])
    def test_strangers_reach_the_gateway_and_metrics_at_most(self, name: str) -> None:
        path = EXAMPLES / f"values-{name}.yaml"
        is_open = name == "cpu-demo"
        assert self.allowed(path, None, "gateway", 8000) is is_open
        for target in LONG_LIVED:
            assert self.allowed(path, None, target, 9100) is is_open
        for target, port in (("router", 8001), ("prefill", 9000), ("decode", 9400)):
            assert not self.allowed(path, None, target, port)
        assert not self.allowed(path, None, "decode", 40000)
        assert not self.allowed(path, "gateway", "decode", 40000)

    def test_workers_use_no_port_outside_the_range(self) -> None:
        for pod in pod_templates(case(EXAMPLES / "values-96-gpu.yaml")):
            if pod.component in ("prefill", "decode"):
                (sysctl,) = pod.template["spec"]["securityContext"]["sysctls"]
                assert sysctl["name"] == "net.ipv4.ip_local_port_range"
                assert sysctl["value"] == "32768 60999"


def test_ctl_finds_the_routers_of_a_release() -> None:
    wanted = dict(part.split("=") for part in SELECTOR.split(",")) | {INSTANCE_LABEL: "epserve"}
    pods = _pods(EXAMPLES / "values-96-gpu.yaml")
    assert {n for n, pod in pods.items() if wanted.items() <= pod.labels.items()} == {"router"}


def test_rbac_is_for_reading_pods_alone() -> None:
    (role,) = of_kind(case(EXAMPLES / "values-96-gpu.yaml"), "Role")
    (rule,) = role["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    everything = case(CHART / "ci" / "everything-values.yaml")
    assert not of_kind(everything, "Role"), "discovery by DNS asks no API"
    for path in values_files():
        assert not of_kind(case(path), "ClusterRole")


def test_dashboards_and_alerts_are_taken_over_whole() -> None:
    objects = case(CHART / "ci" / "everything-values.yaml")
    files = sorted(path.name for path in (CHART / "dashboards").glob("*.json"))
    maps = [each for each in of_kind(objects, "ConfigMap") if "grafana_dashboard" in str(each)]
    assert sorted(name for each in maps for name in each["data"]) == files
    for each in maps:
        ((name, text),) = each["data"].items()
        assert yaml.safe_load(text) == yaml.safe_load((CHART / "dashboards" / name).read_text())
    rules = [each["spec"]["groups"] for each in of_kind(objects, "PrometheusRule")]
    written = [yaml.safe_load(p.read_text())["groups"] for p in (CHART / "alerts").glob("*.yaml")]
    assert rules == written


def test_templates_keep_to_their_bounds() -> None:
    assert len((CHART / "values.yaml").read_text().splitlines()) <= 160
    for path in (CHART / "templates").iterdir():
        limit = 120 if path.name == "_names.tpl" else 200
        assert len(path.read_text().splitlines()) <= limit, path.name


def _pods(path: Path) -> dict[str, PodTemplate]:
    return {pod.component: pod for pod in pod_templates(case(path))}


def test_model_sources() -> None:
    pods = _pods(EXAMPLES / "values-disaggregated-set.yaml")
    worker, gateway = pods["decode"].template["spec"], pods["gateway"].template["spec"]
    (download,) = gateway["initContainers"]
    assert "--exclude=*.safetensors" in download["args"]
    assert download["args"][-2:] == ["store:models/DeepSeek-R1", "/model"]
    assert "--exclude=*.safetensors" not in worker["initContainers"][0]["args"]
    assert worker["initContainers"][0]["envFrom"] == [{"secretRef": {"name": "model-store"}}]
    (kept,) = [volume for volume in worker["volumes"] if volume["name"] == "model"]
    assert kept["hostPath"] == {"path": "/mnt/nvme/models/DeepSeek-R1", "type": "Directory"}
    claims = _pods(EXAMPLES / "values-96-gpu.yaml")["decode"].container["volumeMounts"]
    wanted = {"name": "model", "mountPath": "/model", "readOnly": True, "subPath": "DeepSeek-V3"}
    assert wanted in claims
