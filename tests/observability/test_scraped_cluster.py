"""A real Prometheus has scraped a real cluster through `scenario`: do metrics move, do the
dashboards and alerts ask for what is there?"""

import math
import subprocess
import time

import httpx
import pytest

from scripts.dashboard_pictures import Drawer
from scripts.metric_families import families
from tests.observability.conftest import Played
from tests.observability.promql import substituted
from tests.observability.shipped import DASHBOARD_FILES, alerts, dashboard_of, panel_queries
from tests.observability.tools import tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# What a healthy cluster on one machine, with its list of workers, does not do.
NEED_NOT_MOVE = {
    "epserve_kv_transfer_failures_total": "the killed worker may not be receiving pages just then",
    "epserve_router_discovery_failures_total": "the list of workers is in its flags",
    "epserve_router_rejected_workers": "all workers have the same model and KV layout",
    "epserve_worker_slow": "steps take what they usually take",
    "epserve_worker_stalled": "no rank is held up",
    "epserve_worker_stalls_total": "no rank is held up",
}


def test_every_metric_moves(played: Played) -> None:
    """Counters and histograms have counted, gauges have been above 0 at some scrape."""
    still = {
        family.name
        for family in families()
        if not all(played.prometheus.largest(series) > 0 for series in family.series)
    }
    assert still <= set(NEED_NOT_MOVE)


def test_what_is_scraped_is_what_is_documented(played: Played) -> None:
    """By name and type, as Prometheus itself has read them."""
    scraped = {}
    for name, entries in played.prometheus.metadata().items():
        kind = entries[0]["type"]
        if name.startswith(("epserve_", "process_")):
            # In OpenMetrics, which Prometheus prefers, the family of a counter has no suffix.
            suffix = "_total" if kind == "counter" and not name.endswith("_total") else ""
            scraped[name + suffix] = kind
    known = {family.name: family.kind for family in families()}
    assert scraped == known


def test_promtool_finds_no_fault_with_what_is_exposed(played: Played) -> None:
    for name, address in played.targets.items():
        text = httpx.get(f"http://{address}/metrics", timeout=60).text
        done = subprocess.run(
            [tool("promtool"), "check", "metrics"],
            input=text, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), name


def test_labels_are_bounded(played: Played) -> None:
    """No process has more series than a few for each metric, rank, layer and bucket."""
    for name, address in played.targets.items():
        lines = httpx.get(f"http://{address}/metrics", timeout=60).text.splitlines()
        assert sum(not line.startswith("#") for line in lines) < 400, name


def test_every_panel_has_something_to_draw(played: Played) -> None:
    empty: list[str] = []
    for query in panel_queries():
        values = [
            value
            for series in played.prometheus.range(substituted(query.expression))
            for value in series.values
        ]
        if not any(math.isfinite(value) for value in values):
            empty.append(f"{query.dashboard}: {query.panel}: {query.expression}")
    assert empty == []


def test_alerts_can_be_evaluated_and_are_silent(played: Played) -> None:
    """They have thresholds that a short overload, a drain and a dead worker do not reach within
    the time that they ask for; without thresholds, they find what they look at."""
    for rule in alerts():
        played.prometheus.now(rule["expr"])
        if "absent(" in rule["expr"]:
            continue
        watched, _, threshold = rule["expr"].rstrip().rpartition(" ")
        watched = watched.rstrip().removesuffix(">").removesuffix("<").removesuffix("==")
        float(threshold)
        found = played.prometheus.range(watched)
        assert any(math.isfinite(v) for series in found for v in series.values), rule["alert"]


def test_the_endpoint_picker_finds_its_three_gauges(played: Played) -> None:
    """Without labels of ours, as the Gateway API inference extension reads them."""
    for name in (
        "epserve_gateway_num_waiting_requests",
        "epserve_gateway_num_running_requests",
        "epserve_gateway_kv_usage_ratio",
    ):
        (series,) = played.prometheus.now(name)
        assert set(series.labels) == {"__name__", "instance", "job"}
        assert played.prometheus.largest(name) > 0
    assert played.prometheus.largest("epserve_gateway_kv_usage_ratio") <= 1


def test_dashboards_can_be_drawn(played: Played) -> None:
    """The pages of which the pictures in the docs are taken."""
    with Drawer(played.prometheus.url, seconds=30, end=time.time()) as drawer:
        for path in DASHBOARD_FILES:
            board = dashboard_of(path)
            page, height = drawer.page(board)
            num_panels = sum(panel["type"] != "row" for panel in board["panels"])
            assert page.count('class="panel"') == num_panels
            assert page.count("<polyline") + page.count("<rect") > num_panels
            assert 500 < height < 3000
