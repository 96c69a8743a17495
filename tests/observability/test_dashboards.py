"""The Grafana dashboards, without a Grafana: its own typed model reads and writes them."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from scripts.metric_families import Family, families
from tests.observability.promql import SCRAPE_LABELS, faults, selectors, substituted
from tests.observability.shipped import (
    DASHBOARD_FILES,
    PanelQuery,
    alerts,
    dashboard_of,
    panel_queries,
)

FAMILIES = families()
register_default_plugins()


def names(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", DASHBOARD_FILES, ids=names)
def test_grafanas_model_reads_every_key(path: Path) -> None:
    board = dashboard_of(path)
    assert round_trip(board) == board


def test_the_round_trip_finds_a_misspelt_key() -> None:
    board = dashboard_of(DASHBOARD_FILES[0])
    panel = next(one for one in board["panels"] if one["type"] == "timeseries")
    panel["options"]["legendd"] = panel["options"].pop("legend")
    assert round_trip(board) != board


def round_trip(board: dict[str, Any]) -> Any:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(json.dumps(board)))))


@pytest.mark.parametrize("path", DASHBOARD_FILES, ids=names)
def test_panels_lie_side_by_side(path: Path) -> None:
    panels = dashboard_of(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_dashboards_are_told_apart() -> None:
    boards = [dashboard_of(path) for path in DASHBOARD_FILES]
    assert len(boards) == 5
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 5
    types = {panel["type"] for board in boards for panel in board["panels"]}
    assert types == {"row", "timeseries", "heatmap", "stat", "bargauge"}
    heat = {panel["title"] for board in boards for panel in board["panels"]
            if panel["type"] == "heatmap"}  # fmt: skip
    assert {"Time to first token", "Time between tokens"} <= heat


def label(query: PanelQuery) -> str:
    return f"{query.dashboard}-{query.panel}-{query.legend}".replace(" ", "_")


@pytest.mark.parametrize("query", list(panel_queries()), ids=label)
def test_panels_ask_for_metrics_that_exist(query: PanelQuery) -> None:
    expression = substituted(query.expression)
    assert faults(expression, FAMILIES) == []
    known = {one for name in selectors(expression) for one in labels_of(name)}
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= known


def labels_of(series: str) -> set[str]:
    (family,) = [one for one in FAMILIES if series in one.series]
    return {*family.labels, *SCRAPE_LABELS, "le"}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"], FAMILIES) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(epserve_kv_pages[5m]))", "is a gauge"),
        ("sum(epserve_requests_total)", "wants a rate"),
        ("sum(rate(epserve_requests_total{outcom='ok'}[5m]))", "no label outcom"),
        ("sum by (outcom) (rate(epserve_requests_total[5m]))", "by outcom"),
        ("sum(epserve_kv_page)", "no metric"),
        ("histogram_quantile(0.5, sum(rate(epserve_step_seconds_bucket[5m])))", "sums over le"),
        ("rate(epserve_step_seconds[5m])", "no metric epserve_step_seconds"),
    ],
)
def test_faults_are_found(expression: str, fault: str) -> None:
    assert fault in " ".join(faults(expression, FAMILIES))


def test_nearly_every_metric_is_on_a_dashboard() -> None:
    """Whoever adds a metric shows it, or says here why not."""
    shown = {name for query in panel_queries() for name in selectors(substituted(query.expression))}
    missing = {family.name for family in FAMILIES if not shown & set(family.series)}
    assert missing == NOT_SHOWN


NOT_SHOWN = {
    "epserve_build_info",  # the dashboards' variables come from it
    "epserve_gateway_kv_usage_ratio",  # for endpoint pickers; the workers' own is shown
    "epserve_gateway_tasks",  # for the search of leaks
    "epserve_kv_info",  # facts
    "epserve_router_discovery_failures_total",  # an alert watches it
    "epserve_router_members",  # what discovery says; what the workers say is shown
    "process_virtual_memory_bytes",
    "process_open_fds",
    "process_max_fds",
}


def test_every_family_is_one_family() -> None:
    """Names, kinds and labels as Prometheus wants them."""
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.text, family
        check_name(family)


def check_name(family: Family) -> None:
    assert re.fullmatch(r"(epserve|process)_[a-z0-9_]+", family.name), family
    assert (family.kind == "counter") == family.name.endswith("_total"), family
    if family.kind == "histogram":
        units = ("_seconds", "_tokens", "_size")
        assert family.name.endswith(units), family
    assert not re.search(r"_(ms|millis|gb|mb|kb|percent|minutes)(_|$)", family.name), family
    assert not {"request_id", "epoch", "user", "key"} & set(family.labels), family
