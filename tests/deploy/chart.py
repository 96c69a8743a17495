"""The chart rendered with every values file there is, for the tests of this folder."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "epserve"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"

Object = dict[str, Any]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_chart", ROOT / "scripts/render_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


def values_files() -> list[Path]:
    return sorted([*EXAMPLES.glob("values-*.yaml"), *(CHART / "ci").glob("*-values.yaml")])


def load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def long_lived(path: Path) -> tuple[str, ...]:
    """Components whose pods do not end by themselves; workers alone join another release."""
    workers = ("prefill", "decode")
    return workers if load(path).get("joins") else ("gateway", "router", *workers)


@cache
def case(path: Path) -> tuple[Object, ...]:
    """The objects of one values file."""
    return tuple(parse(script.objects(load(path))))


def parse(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def render(values: dict[str, Any], **options: Any) -> list[Object]:
    return parse(script.objects(values, **options))


def overlaid(base: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A copy of `base` in which the value at `path` is another."""
    key, *rest = path
    inner = overlaid(base.get(key) or {}, *rest, value=value) if rest else value
    return {**base, key: inner}


@dataclass(frozen=True)
class PodTemplate:
    """The pods that one object asks for."""

    owner: Object
    component: str
    template: Object
    num_pods: int  # of one group

    @property
    def container(self) -> Object:
        """The process's, which comes before sidecars."""
        container, *_ = self.template["spec"]["containers"]
        found: Object = container
        return found

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found


def pod_templates(objects: tuple[Object, ...] | list[Object]) -> Iterator[PodTemplate]:
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Deployment":
            yield _template(each, spec["template"], 1)
        elif each["kind"] == "LeaderWorkerSet":
            yield _group(each, spec)
        elif each["kind"] == "DisaggregatedSet":
            for role in spec["roles"]:
                yield _group(each, role["spec"])
        elif each["kind"] == "Pod":
            yield _template(each, each, 1)


def _group(owner: Object, spec: Object) -> PodTemplate:
    group = spec["leaderWorkerTemplate"]
    return _template(owner, group["workerTemplate"], group["size"])


def _template(owner: Object, template: Object, num_pods: int) -> PodTemplate:
    labels = template["metadata"]["labels"]
    return PodTemplate(owner, labels["app.kubernetes.io/component"], template, num_pods)
