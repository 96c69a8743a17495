"""Wrong values are refused, in words that name the value."""

from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import CHART, overlaid, render

WRONG: list[tuple[str, Any, str]] = [
    ("image.repository", "Upper Case", "at '/image/repository'"),
    ("image.digest", "sha256:12", "at '/image/digest'"),
    ("image.pullPolicy", "Sometimes", "at '/image/pullPolicy': value must be one of"),
    ("imagee", {}, "additional properties 'imagee' not allowed"),
    ("model.source", "s3", "at '/model/source': value must be one of 'image', 'hostPath'"),
    ("model.servedName", "", "at '/model/servedName'"),
    ("model.source", "pvc", "model.source pvc needs model.claim"),
    ("model.path", "relative/folder", 'model.path "relative/folder" must begin with /'),
    ("model", {"source": "objectStore", "path": "/m"}, "must be STORE:BUCKET/FOLDER"),
    ("model", {"source": "pvc", "claim": "c", "path": "/m"}, "must be relative"),
    (
        "model",
        {"source": "objectStore", "path": "s:b", "sizeGiB": 801},
        "sizeLimit 800Gi is less than model.sizeGiB 801: pods would be evicted",
    ),
    ("log.level", "loud", "at '/log/level'"),
    ("tracing.sampleRatio", 2, "at '/tracing/sampleRatio': maximum: got 2, want 1"),
    ("gateway.replicas", -1, "at '/gateway/replicas': minimum: got -1, want 0"),
    ("gateway.replicas", "2", "at '/gateway/replicas': got string, want integer"),
    ("gateway.settings.max-infligth", 1, "additional properties 'max-infligth' not allowed"),
    ("gateway.settings.max-inflight", 0, "at '/gateway/settings/max-inflight': minimum: got 0"),
    ("gateway.settings.sampling-defaults", "mine", "at '/gateway/settings/sampling-defaults'"),
    ("gateway.settings.guard-all-paths", True, "'guard-all-paths' not allowed"),
    ("gateway.settings.listen", "0.0.0.0:1", "additional properties 'listen' not allowed"),
    ("gateway.service.port", 70000, "at '/gateway/service/port': maximum: got 70,000"),
    ("gateway.env.9", "x", "at '/gateway/env': additional properties '9' not allowed"),
    ("gateway.env.RANK", 1, "at '/gateway/env/RANK': got number, want string"),
    ("gateway.resources.requests.memory", "4 GB", "at '/gateway/resources/requests/memory'"),
    ("router.replicas", 0, "at '/router/replicas': minimum: got 0, want 1"),
    ("router.discovery", "static", "at '/router/discovery'"),
    ("router.adminToken.value", "short", "at '/router/adminToken/value'"),
    ("workers.kind", "StatefulSet", "at '/workers/kind': value must be one of"),
    ("workers.decode.node", 2, "additional properties 'node' not allowed"),
    ("workers.decode.surge", -1, "at '/workers/decode/surge'"),
    ("workers.decode.surge", "one", "at '/workers/decode/surge'"),
    ("joins.release", "blue", "joins needs both: release, "),
    ("joins", {"release": "epserve", "router": "r"}, "joins.release is epserve, this release"),
    ("", {"joins": {"release": "a", "router": "r"}, "autoscaling": {"kind": "hpa"}}, "not scaled"),
    ("", {"joins": {"release": "a", "router": "r"}, "ingress": {"kind": "Ingress"}}, "no gateway"),
    ("workers.decode.nodes", 0, "at '/workers/decode/nodes': minimum: got 0, want 1"),
    ("workers.decode.ranks", 65, "at '/workers/decode/ranks': maximum: got 65, want 64"),
    ("workers.common.device", "cuda:1", "at '/workers/common/device': value must be one of"),
    ("workers.prefill.settings.chunk-tokens", "many", "got string, want integer"),
    ("workers.prefill.settings.ranks", 2, "additional properties 'ranks' not allowed"),
    ("workers.prefill.shmSize", "64 GiB", "at '/workers/prefill/shmSize'"),
    ("workers.prefill.rdma", {"resource": "rdma/hca"}, "workers.prefill.rdma.count must be 1"),
    ("workers.disaggregatedSet.placement", "ExclusiveSlice", "placement needs a topologyKey"),
    ("workers", {"kind": "Deployment", "decode": {"nodes": 2}}, "workers.decode.nodes is 2"),
    (
        "workers",
        {"kind": "Deployment", "common": {"exclusiveTopology": "rack"}},
        "exclusiveTopology needs workers.kind LeaderWorkerSet",
    ),
    ("workers.common.device", "cuda", "give model.sizeGiB, the checkpoint's size (du -s"),
    ("workers.decode.cache", {"hostPath": "/c", "claim": "c"}, "decode.cache: give hostPath or"),
    ("workers.prefill.rdma", {"count": 1}, "workers.prefill.rdma.count needs rdma.resource"),
    ("workers.common", {"hostIPC": True, "shmSize": "1Gi"}, "shmSize means nothing with hostIPC"),
    ("workers.prefill.settings.page-tokens", 32, "prefill has page-tokens 32, decode 64"),
    ("workers.decode.settings.dtype", "bfloat16", "prefill has dtype float32, decode bfloat16"),
    ("workers.decode.settings.load-format", "dummy", "prefill has load-format auto, decode dummy"),
    (
        "workers.decode.settings.speculative-tokens",
        2,
        "prefill has MTP KV (speculative-tokens) false, decode true",
    ),
    ("workers.decode.shmSize", "9Gi", "shared memory counts towards it, and each GPU rank"),
    (
        "workers.common.resources",
        {"requests": {"memory": "16Gi"}, "limits": {"memory": "15.5Gi"}},
        "the memory request 16Gi is above the limit 15.5Gi",
    ),
    ("workers.common.resources.limits.cpu", "1500m", "the cpu request 2 is above the limit 1500m"),
    (
        "workers.common.pod.probes.startup",
        {"periodSeconds": 5, "failureThreshold": 10},
        "probes.startup gives up after 50 s, startSeconds is 600",
    ),
    ("workers.common.env.A", {"value": "x"}, "at '/workers/common/env/A'"),
    ("workers.common.rdma.devices", ["mlx5_0"], "at '/workers/common/rdma/devices/0'"),
    ("workers.common.startSeconds", 5, "at '/workers/common/startSeconds'"),
    ("network.ipFamilies", ["IPv5"], "at '/network/ipFamilies/0'"),
    (
        "network",
        {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4", "IPv6"]},
        "SingleStack takes one of network.ipFamilies",
    ),
    ("pods.podSecurityContext.runAsUser", 0, "runAsNonRoot and runAsUser 0"),
    ("pods.sidecar", [], "additional properties 'sidecar' not allowed"),
    ("pods.labels", {"epserve.io/role": "x"}, "invalid propertyName 'epserve.io/role'"),
    ("gateway.pod.probes.startup.period", 1, "additional properties 'period' not allowed"),
    ("gateway.placement.scheduler", "x", "additional properties 'scheduler' not allowed"),
    ("fullnameOverride", "a" * 29, "at '/fullnameOverride'"),
    ("autoscaling.kind", "vpa", "at '/autoscaling/kind'"),
    ("autoscaling.decode.kvUse", 80, "at '/autoscaling/decode/kvUse': maximum: got 80, want 1"),
    ("autoscaling.prefill", {"min": 5, "max": 2}, "autoscaling.prefill: min 5 is above max 2"),
    ("autoscaling.prometheusUrl", "prometheus:9090", "at '/autoscaling/prometheusUrl'"),
    ("disruptionBudgets.maxUnavailable", "0%", "at '/disruptionBudgets/maxUnavailable'"),
    ("networkPolicy.kvPorts", {"first": 5000, "last": 4000}, "first 5000 is not below last 4000"),
    ("networkPolicy.gatewayFrom", [{"host": "x"}], "additional properties 'host' not allowed"),
    ("monitoring.podMonitor", True, "at '/monitoring/podMonitor': value must be one of"),
    ("monitoring.interval", "15", "at '/monitoring/interval'"),
    ("ingress.kind", "Route", "at '/ingress/kind'"),
    ("ingress.kind", "HTTPRoute", "HTTPRoute needs ingress.parentRefs"),
    ("ingress.host", "https://llm.example.com", "at '/ingress/host'"),
    ("tests.timeoutSeconds", 1, "at '/tests/timeoutSeconds'"),
]


@pytest.mark.parametrize(("path", "value", "reason"), WRONG)
def test_refused_with_a_reason(path: str, value: Any, reason: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(overlaid({}, *path.split("."), value=value) if path else value, name="epserve")
    assert reason in str(caught.value)


EIGHT = {"model": {"sizeGiB": 642}, "workers": {"common": {"device": "cuda", "ranks": 8}}}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"nvidia.com/gpu": 4}, "has 4 of nvidia.com/gpu for 8 ranks: leave it out"),
        ({"memory": "48Gi"}, "and each GPU rank needs 5Gi; give 56Gi or more"),
        ({"memory": "55.9Gi"}, "give 56Gi or more"),
    ],
)
def test_limits_of_gpu_pods(limits: dict[str, Any], reason: str) -> None:
    resources = {"requests": {"memory": "9Gi"}, "limits": limits}
    values = overlaid(EIGHT, "workers", "common", "resources", value=resources)
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert reason in str(caught.value)
    render(overlaid(values, "workers", "common", "resources", "limits", value={"memory": "56Gi"}))


def _objects(schema: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)] if schema.get("type") == "object" else []
    for name, inner in schema.get("properties", {}).items():
        found += _objects(inner, f"{path}/{name}")
    if isinstance(schema.get("items"), dict):
        found += _objects(schema["items"], f"{path}[]")
    return found


def test_every_object_of_the_schema_is_closed() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    objects = _objects(schema, "")
    for name, definition in schema["$defs"].items():
        objects += _objects(definition, name)
    # What Kubernetes itself defines, and Helm's own `global`, are other people's to check.
    foreign = ("Affinity", "Selector", "global", "podAntiAffinity", "kubernetes")
    is_open = [
        path for path, each in objects
        if each.get("additionalProperties", True) is True and not path.endswith(foreign)
    ]  # fmt: skip
    assert is_open == []


def test_every_value_stands_in_the_schema() -> None:
    """Also those that values.yaml sets: with any of them renamed, nothing would render."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in values:
        renamed = {f"{key}x" if key == name else key: value for key, value in values.items()}
        with pytest.raises(helm_python.HelmError, match=f"'{name}x' not allowed"):
            render(renamed)
