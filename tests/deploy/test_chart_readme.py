"""The chart's README describes every value, with its default, and links to what exists."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from tests.deploy.chart import CHART, case, values_files

README = CHART / "README.md"
# Maps that users fill as they like: one row, however many keys they have.
WHOLE = ("requests", "limits", "labels", "podSecurityContext", "containerSecurityContext")


def leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in WHOLE:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def table() -> dict[str, str]:
    section = README.read_text().partition("\n## Values\n")[2]
    return dict(re.findall(r"^\| `([\w.]+)` \| *(?:`(.*?)`)? *\|", section, re.MULTILINE))


def test_every_value_has_a_row_with_its_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    wanted = dict(leaves(values))
    rows = table()
    assert list(rows) == list(wanted)
    for name, default in rows.items():
        shown = yaml.safe_load(default) if default else ""
        if isinstance(shown, dict):
            shown = {key: str(value) for key, value in shown.items()}
        assert wanted[name] in (shown, yaml.safe_load(default or "''")), name


def test_every_example_is_listed_and_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README.read_text())
    files = {(CHART / link).resolve() for link in links if not link.startswith(("http", "#"))}
    assert [path for path in files if not path.exists()] == []
    assert {path for path in values_files() if path.name.startswith("values-")} <= files


def test_adapter_rules_serve_what_the_autoscaler_asks_for() -> None:
    block = re.search(r"```yaml\n(rules:.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    rules = {rule["name"]["as"]: rule for rule in yaml.safe_load(block[1])["rules"]["external"]}
    asked = {
        metric["external"]["metric"]["name"]: metric["external"]["metric"]["selector"]
        for path in values_files() for each in case(path)
        if each["kind"] == "HorizontalPodAutoscaler" for metric in each["spec"]["metrics"]
        if metric["type"] == "External"
    }  # fmt: skip
    assert set(rules) == set(asked)
    triggers = [
        trigger["metadata"]["query"] for path in values_files() for each in case(path)
        if each["kind"] == "ScaledObject" for trigger in each["spec"]["triggers"]
    ]  # fmt: skip
    mine = 'namespace="serving",app_kubernetes_io_instance="epserve"'
    # Both kinds of autoscaling look at the same thing.
    queries = {rule["metricsQuery"].replace("<<.LabelMatchers>>", mine) for rule in rules.values()}
    assert queries == set(triggers)
    assert all("app_kubernetes_io_instance" in each["matchLabels"] for each in asked.values())


def test_queries_ask_for_metrics_and_labels_that_exist() -> None:
    page = (CHART.parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(epserve_\w+)` \| \w+ \| (.*?) \|", page, re.MULTILINE)
    scraped = {"namespace", "app_kubernetes_io_instance"}
    known = {name: {*re.findall(r"`(\w+)`", labels), *scraped} for name, labels in rows}
    queries = [
        trigger["metadata"]["query"] for path in values_files() for each in case(path)
        if each["kind"] == "ScaledObject" for trigger in each["spec"]["triggers"]
    ]  # fmt: skip
    assert len(queries) >= 3
    for query in queries:
        promql_parser.parse(query)
        for name, labels in re.findall(r"(epserve_\w+?)(?:_bucket)?\{(.*?)\}", query):
            assert set(re.findall(r"(\w+)=", labels)) <= known[name]
