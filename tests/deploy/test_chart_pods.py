"""What pods take over from the values: sizes, networks, and all that Kubernetes offers."""

import re
from typing import Any

import pytest

from engine.process.settings import WorkerSettings
from tests.deploy.chart import (
    CHART,
    ROOT,
    Object,
    PodTemplate,
    case,
    overlaid,
    pod_templates,
    render,
)

EVERYTHING = CHART / "ci" / "everything-values.yaml"
LONG_LIVED = ("gateway", "router", "prefill", "decode")
GPU: Object = {"model": {"sizeGiB": 642}, "workers": {"common": {"device": "cuda", "ranks": 8}}}


def pods(values: dict[str, Any]) -> dict[str, PodTemplate]:
    return {pod.component: pod for pod in pod_templates(render(values))}


def variables(pod: PodTemplate) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod.container["env"]}


def named(items: list[Object]) -> set[str]:
    return {item["name"] for item in items}


@pytest.mark.parametrize("component", LONG_LIVED)
def test_every_pod_takes_what_all_pods_have(component: str) -> None:
    (pod,) = [pod for pod in pod_templates(case(EVERYTHING)) if pod.component == component]
    spec, container = pod.template["spec"], pod.container
    assert pod.template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rail-0"
    assert pod.labels["team"] == "serving"
    assert "tail" in named(spec["containers"])
    assert spec["initContainers"][-1]["name"] == "first"
    assert "certificates" in named(spec["volumes"]) & named(container["volumeMounts"])
    assert container["envFrom"] == [{"configMapRef": {"name": "proxy", "optional": True}}]
    security = spec["securityContext"]
    assert (security["runAsUser"], security["fsGroup"]) == (1000690000, 1000690000)
    assert security["fsGroupChangePolicy"] == "OnRootMismatch", "what is not given stays"
    assert container["securityContext"]["privileged"] is False
    assert container["readinessProbe"]["periodSeconds"] == 7
    assert container["livenessProbe"]["timeoutSeconds"] == 20


def test_a_component_has_the_last_word() -> None:
    found = {pod.component: pod for pod in pod_templates(case(EVERYTHING))}
    assert found["gateway"].container["startupProbe"]["failureThreshold"] == 99
    assert found["gateway"].labels["tier"] == "edge"
    assert "tier" not in found["router"].labels
    capabilities = found["decode"].container["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_PTRACE"]}
    assert variables(found["gateway"])["HTTPS_PROXY"] == {
        "secretKeyRef": {"name": "proxy", "key": "url"}
    }
    # A test that ends needs no company that does not.
    assert len(found["smoke-test"].template["spec"]["containers"]) == 1


def test_a_key_set_to_null_is_left_out() -> None:
    for pod in pods(overlaid({}, "pods", "podSecurityContext", "runAsUser", value=None)).values():
        assert "runAsUser" not in pod.template["spec"]["securityContext"]


def test_gpu_workers_are_sized_by_the_checkpoint() -> None:
    found = pods(GPU)
    for role in ("prefill", "decode"):
        resources = found[role].container["resources"]
        gpus = {"nvidia.com/gpu": "8"}
        assert resources["requests"] == {"cpu": "36", "memory": "120Gi", **gpus}
        assert resources["limits"] == {"memory": "762Gi", **gpus}
        (shm,) = [each for each in found[role].template["spec"]["volumes"] if each["name"] == "shm"]
        assert shm["emptyDir"]["sizeLimit"] == "16Gi"
        assert "--start-timeout-seconds=3361" in found[role].container["args"]
        probe = found[role].container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] > 3361 + 30


def test_sizes_follow_ranks_and_nodes_and_give_way_a_key_at_a_time() -> None:
    values = overlaid(GPU, "workers", "decode", value={"ranks": 4, "nodes": 2})
    values = overlaid(values, "workers", "prefill", "resources", value={"requests": {"cpu": "9"}})
    resources = {role: pod.container["resources"] for role, pod in pods(values).items()}
    assert resources["decode"]["requests"]["memory"] == "64Gi"
    assert resources["decode"]["limits"]["memory"] == f"{64 + 321}Gi"
    assert resources["prefill"]["requests"]["cpu"] == "9"
    assert resources["prefill"]["requests"]["memory"] == "120Gi"


def test_namespaces_and_memory_of_the_node() -> None:
    values = overlaid({}, "workers", "common", value={"hostIPC": True, "hostPID": True})
    for role in ("prefill", "decode"):
        spec = pods(values)[role].template["spec"]
        assert (spec["hostIPC"], spec["hostPID"]) == (True, True)
        # A volume of the pod's own in its place would be nobody else's.
        assert "shm" not in named(spec["volumes"])


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({}, {"emptyDir": {}}),
        ({"hostPath": "/c"}, {"hostPath": {"path": "/c", "type": "Directory"}}),
        ({"claim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
    ],
)
def test_caches_are_kept(cache: dict[str, str], source: Object) -> None:
    pod = pods(overlaid({}, "workers", "common", "cache", value=cache))["decode"]
    assert {"name": "cache", **source} in pod.template["spec"]["volumes"]
    assert {"name": "cache", "mountPath": "/var/cache/epserve"} in pod.container["volumeMounts"]


@pytest.mark.parametrize("policy", ["", "RequireDualStack"])
@pytest.mark.parametrize("families", [[], ["IPv4"], ["IPv6"], ["IPv4", "IPv6"], ["IPv6", "IPv4"]])
def test_address_families(policy: str, families: list[str]) -> None:
    network = {"ipFamilyPolicy": policy, "ipFamilies": families}
    objects = render({"network": network, "router": {"discovery": "dns"}})
    services = [each["spec"] for each in objects if each["kind"] == "Service"]
    assert len(services) == 4
    for spec in services:
        assert spec.get("ipFamilyPolicy", "") == policy
        assert spec.get("ipFamilies", []) == families
    found = {pod.component: pod for pod in pod_templates(objects)}
    host = "[::]" if "IPv6" in families or policy else "0.0.0.0"
    for component in LONG_LIVED:
        assert any(
            arg.startswith(f"--listen={host}:") for arg in found[component].container["args"]
        )
    is_first = families[:1] == ["IPv6"]
    assert ("NCCL_SOCKET_FAMILY" in variables(found["decode"])) == is_first


RDMA: dict[str, Any] = {
    "socketInterface": "eth0", "devices": ["mlx5_0:1", "mlx5_1:1"], "gidIndex": 3,
    "nicHandler": "cpu", "gdrcopy": True,
}  # fmt: skip


def network_variables(**rdma: Any) -> dict[str, Any]:
    given = {"resource": "rdma/ib", "count": 1, "nicHandler": "auto", **rdma}
    values = overlaid({}, "workers", "common", value={"rdma": given, "nodes": 2})
    found = variables(pods(values)["decode"])
    mine = ("NCCL", "GLOO", "NVSHMEM", "UCX", "NVIDIA")
    return {name: value for name, value in found.items() if name.startswith(mine)}


@pytest.mark.parametrize("value", RDMA)
def test_the_page_names_the_variables_of_each_value(value: str) -> None:
    page = (ROOT / "docs" / "network.md").read_text()
    row = re.search(rf"^\| `{value}` \|([^|]*)\|", page, re.MULTILINE)
    assert row is not None
    told = {name.partition("=")[0] for name in re.findall(r"`([A-Z_]+(?:=\w+)?)`", row[1])}
    assert told == set(network_variables(**{value: RDMA[value]})) != set()


def test_network_variables() -> None:
    assert network_variables() == {}
    found = network_variables(**RDMA)
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1,eth0"
    assert found["NVSHMEM_IB_GID_INDEX"] == "3"
    given = {"rdma": RDMA | {"resource": "rdma/ib", "count": 1}, "env": {"NCCL_IB_HCA": "mlx5"}}
    one_node = variables(pods(overlaid({}, "workers", "common", value=given))["prefill"])
    assert one_node["NCCL_IB_HCA"] == "mlx5"
    assert "NVSHMEM_IBGDA_NIC_HANDLER" not in one_node


def test_existing_service_accounts() -> None:
    objects = render({"serviceAccounts": {"pods": "mine", "router": "watcher"}})
    assert [each for each in objects if each["kind"] == "ServiceAccount"] == []
    (binding,) = [each for each in objects if each["kind"] == "RoleBinding"]
    assert [subject["name"] for subject in binding["subjects"]] == ["watcher"]
    for pod in pod_templates(objects):
        wanted = "watcher" if pod.component == "router" else "mine"
        assert pod.template["spec"]["serviceAccountName"] == wanted


def test_one_name_for_all() -> None:
    objects = render({"fullnameOverride": "llm"}, name="release")
    assert {each["metadata"]["name"].partition("-")[0] for each in objects} == {"llm"}
    # A second release of the same name would take over nothing.
    assert {pod.labels["app.kubernetes.io/instance"] for pod in pod_templates(objects)} == {
        "release"
    }


def test_defaults_may_be_written_out_for_one_role() -> None:
    """What the chart compares are the defaults of the processes."""
    fields = WorkerSettings.model_fields
    for flag in ("page_tokens", "load_format", "dtype"):
        settings = {flag.replace("_", "-"): fields[flag].default}
        render(overlaid({}, "workers", "decode", "settings", value=settings))
    render(overlaid({}, "workers", "decode", "settings", value={"dtype": "float32"}))
