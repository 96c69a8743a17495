"""The dashboards and alert rules that ship, as data."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "epserve"
DASHBOARD_FILES = sorted((CHART / "dashboards").glob("*.json"))
ALERT_FILES = sorted((CHART / "alerts").glob("*.yaml"))


class PanelQuery(NamedTuple):
    dashboard: str
    panel: str
    expression: str
    legend: str


def dashboard_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def panel_queries() -> Iterator[PanelQuery]:
    """Every query of every panel, with Grafana's variables still in it."""
    for path in DASHBOARD_FILES:
        board = dashboard_of(path)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield PanelQuery(
                    board["uid"], panel["title"], target["expr"], target["legendFormat"]
                )


def alerts() -> list[dict[str, Any]]:
    return [
        rule
        for path in ALERT_FILES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def pod_labels() -> frozenset[str]:
    """What the chart's PodMonitor adds to what is scraped, as Prometheus names it."""
    rendered = (REPOSITORY / "deploy/helm/examples/output-keda.yaml").read_text()
    (monitor,) = (
        each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "PodMonitor"
    )
    return frozenset(re.sub(r"\W", "_", label) for label in monitor["spec"]["podTargetLabels"])
