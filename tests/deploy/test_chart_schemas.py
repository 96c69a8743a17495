"""Every object is one that Kubernetes, or the operator it is for, takes: strictly."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.chart import CHART, ROOT, Object, case, values_files

CRDS = Path(os.environ.get("EPSERVE_CRDS") or ROOT.parent / "shared" / "crds")
VERSIONS = ("1.30", "1.36")
# What HTTPRoute (gateway.networking.k8s.io/v1) has of what the chart uses; its CRD is not at hand.
HTTP_ROUTE = {
    "parentRefs": {"name": {}, "namespace": {}, "sectionName": {}, "port": {}},
    "hostnames": {},
    "rules": {"backendRefs": {"name": {}, "port": {}}, "timeouts": {"request": {}}},
}

SCHEMA_CONTENTS = cache(kubernetes_validate.utils.schema_contents)

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(),
    reason=f"left out: there are no CRDs in {CRDS} (EPSERVE_CRDS names their folder)",
)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validator would parse megabytes of definitions anew for each object."""
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", SCHEMA_CONTENTS)


def builtin(objects: tuple[Object, ...]) -> list[Object]:
    groups = ("v1", "apps/v1", "policy/v1", "autoscaling/v2")
    return [
        each for each in objects
        if each["apiVersion"] in groups or each["apiVersion"].partition("/")[0].endswith(
            ("networking.k8s.io", "authorization.k8s.io")
        ) and each["kind"] != "HTTPRoute"
    ]  # fmt: skip


@cache
def crd_schema(api_version: str, kind: str) -> dict[str, Any]:
    """Closed schema of a custom resource: what is not listed is refused."""
    for path in CRDS.glob(f"{api_version.partition('/')[0]}_*.yaml"):
        crd = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        if crd["names"]["kind"] == kind:
            wanted = api_version.partition("/")[2]
            (version,) = [one for one in crd["versions"] if one["name"] == wanted]
            closed = close(version["schema"]["openAPIV3Schema"])
            closed["properties"]["metadata"] = {"type": "object"}
            return closed
    raise AssertionError(f"there is no CRD of {api_version} {kind} in {CRDS}")


def close(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made.pop("anyOf", None)
    if "properties" in made:
        made["properties"] = {name: close(one) for name, one in made["properties"].items()}
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if isinstance(made.get("items"), dict):
        made["items"] = close(made["items"])
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = close(made["additionalProperties"])
    made.pop("format", None)
    return made


def complaints(each: Object) -> list[str]:
    validator = Draft202012Validator(crd_schema(each["apiVersion"], each["kind"]))
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(each)]


@pytest.mark.parametrize("version", VERSIONS)
def test_builtin_kinds(version: str) -> None:
    """The oldest version that the chart takes, and a recent one."""
    everything = [each for path in values_files() for each in builtin(case(path))]
    # Many files render the same Services and accounts.
    distinct = {json.dumps(each, sort_keys=True): each for each in everything}
    assert len(distinct) >= 30
    for each in distinct.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_oldest_version_is_the_one_the_chart_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_pods_of_custom_kinds(path: Path) -> None:
    """Also without the CRDs: the pods inside are pods."""
    for each in case(path):
        specs = [each["spec"]] if each["kind"] == "LeaderWorkerSet" else [
            role["spec"] for role in each.get("spec", {}).get("roles", ())
        ]  # fmt: skip
        for spec in specs:
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
            metadata = {"name": "pod", **template["metadata"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
            kubernetes_validate.validate(pod | {"spec": template["spec"]}, "1.32", strict=True)


@needs_crds
@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_custom_kinds(path: Path) -> None:
    known = [id(each) for each in builtin(case(path))]
    custom = [e for e in case(path) if id(e) not in known and e["kind"] != "HTTPRoute"]
    assert {complaint for each in custom for complaint in complaints(each)} == set()


@needs_crds
def test_every_custom_kind_is_rendered_somewhere() -> None:
    kinds = {each["kind"] for path in values_files() for each in case(path)}
    assert {
        "LeaderWorkerSet", "DisaggregatedSet", "ScaledObject", "PodMonitor", "HTTPRoute",
        "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy", "PodDisruptionBudget", "Secret",
    } <= kinds  # fmt: skip


@needs_crds
def test_a_misspelt_field_is_found() -> None:
    (groups, *_) = [
        each for path in values_files() for each in case(path) if each["kind"] == "LeaderWorkerSet"
    ]
    spec = groups["spec"]
    assert complaints(groups) == []
    assert complaints({**groups, "spec": {**spec, "replica": 1}}) != []
    template = {**spec["leaderWorkerTemplate"], "restartPolicy": "Sometimes"}
    assert complaints({**groups, "spec": {**spec, "leaderWorkerTemplate": template}}) != []


def test_http_route_has_only_known_fields() -> None:
    routes = [each for p in values_files() for each in case(p) if each["kind"] == "HTTPRoute"]
    assert len(routes) == 1
    assert routes[0]["apiVersion"] == "gateway.networking.k8s.io/v1"
    _check_fields(routes[0]["spec"], HTTP_ROUTE)


def _check_fields(value: Any, known: dict[str, Any]) -> None:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            assert set(each) <= set(known)
            for name, inner in each.items():
                _check_fields(inner, known[name])
