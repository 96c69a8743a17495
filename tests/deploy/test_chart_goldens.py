"""What is committed beside the chart is what the chart and the code make today."""

from pathlib import Path

import helm_python
import pytest

from tests.deploy.chart import CHART, EXAMPLES, ROOT, load, render, script, values_files


def test_files_are_fresh() -> None:
    stale = [path for path, text in script.products() if path.read_text() != text]
    assert [str(path.relative_to(ROOT)) for path in stale] == [], "stale: make docs"
    outputs = {path.name for path in EXAMPLES.glob("output-*.yaml")}
    assert outputs == {path.name for path, _ in script.products()} - {"values.schema.json"}


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
@pytest.mark.parametrize("kube_version", ["v1.30.0", "v1.36.0"])
def test_lint(path: Path, kube_version: str) -> None:
    found = helm_python.lint(str(CHART), load(path), strict=True, kube_version=kube_version)
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_operators_are_used_where_the_cluster_has_them() -> None:
    kinds = {each["kind"] for each in render({})}
    assert {"PodMonitor", "PrometheusRule"} <= kinds or not list((CHART / "alerts").iterdir())
    kinds = {each["kind"] for each in render({}, api_versions=())}
    assert not {"PodMonitor", "PrometheusRule"} & kinds


@pytest.mark.parametrize("source", ["image", "objectStore"])
def test_notes_tell_how_to_ask(source: str) -> None:
    values = {"model": {"source": source, "path": "/m" if source == "image" else "s:b/m"}}
    notes = script.render(values)["epserve/templates/NOTES.txt"]
    assert "port-forward service/epserve-gateway 8000:80" in notes
    assert "WARNING: no API keys are set" in notes
    assert "\n\n\n" not in notes
