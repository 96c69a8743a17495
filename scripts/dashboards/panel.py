"""What our dashboards are made of, on top of Grafana's own typed model.

dashboard("epserve-x", "Title", "What it is for", [
    Section("Requests", [
        Lines(title="By outcome", queries=[Query(rate("epserve_requests_total", "outcome"))]),
    ]),
])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as model
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

# Labels that scrapes add in a cluster of several releases; empty ones match as well.
SCOPE = 'namespace=~"$namespace",app_kubernetes_io_instance=~"$release"'
RATE = "$__rate_interval"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 8
TAG = "epserve"


def select(name: str, *matchers: str) -> str:
    """`name` in the chosen namespaces and releases."""
    return f"{name}{{{','.join((SCOPE, *matchers))}}}"


def rate(name: str, by: str = "", *matchers: str) -> str:
    """How fast a counter grows, a second; one line for each value of `by`."""
    return f"sum{grouped(by)}(rate({select(name, *matchers)}[{RATE}]))"


def active(name: str, by: str, *matchers: str) -> str:
    """As `rate`, without the lines at 0: of some labels most values hardly ever come."""
    return f"{rate(name, by, *matchers)} > 0"


def total(name: str, by: str = "", *matchers: str) -> str:
    """A gauge, added up; one line for each value of `by`."""
    return f"sum{grouped(by)}({select(name, *matchers)})"


def grouped(by: str) -> str:
    return f" by ({by}) " if by else ""


def quantile(share: float, name: str, *matchers: str, by: str = "") -> str:
    """Of a histogram, over the last few scrapes."""
    labels = f"le, {by}" if by else "le"
    buckets = f"rate({select(name + '_bucket', *matchers)}[{RATE}])"
    return f"histogram_quantile({share}, sum by ({labels}) ({buckets}))"


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` may name labels: {{rank}}."""

    expression: str
    legend: str = ""


def quantiles(name: str, *matchers: str) -> list[Query]:
    """Median, 95th and 99th percentile."""
    return [
        Query(quantile(share, name, *matchers), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`unit` is Grafana's name of it; `text` shows by the panel's info button."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    text: str = ""
    width: int = WIDTH

    def build_on(self, panel: Any) -> Any:  # noqa: ANN401 - the panel builders share no base
        panel.title(self.title).datasource(SOURCE).unit(self.unit).span(self.width).height(HEIGHT)
        if self.text:
            panel.description(self.text)
        for index, query in enumerate(self.queries):
            panel.with_target(self._target(query, chr(ord("A") + index)))
        return panel

    def _target(self, query: Query, ref_id: str) -> prometheus.Dataquery:
        target = prometheus.Dataquery().datasource(SOURCE).ref_id(ref_id).expr(query.expression)
        return target.legend_format(query.legend or "__auto").range()

    def builder(self) -> Any:  # noqa: ANN401
        raise AssertionError("a panel is one of the classes below")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Panel):
    """Over time; `is_stacked` where the lines add up to something. `most` fixes the axis."""

    is_stacked: bool = False
    most: float | None = None

    def builder(self) -> timeseries.Panel:
        panel = self.build_on(timeseries.Panel()).min(0).line_width(1)
        panel.fill_opacity(30 if self.is_stacked else 8).show_points(common.VisibilityMode.NEVER)
        panel.legend(
            build.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        panel.tooltip(build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        if self.is_stacked:
            panel.stacking(build.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        return panel if self.most is None else panel.max(self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat(Panel):
    """How a histogram's observations are spread, over time; `queries` has the one metric's name."""

    @staticmethod
    def of(title: str, metric: str, *matchers: str, unit: str = "s", text: str = "") -> "Heat":
        grown = f"sum by (le) (increase({select(metric + '_bucket', *matchers)}[{RATE}]))"
        return Heat(title=title, queries=[Query(grown, "{{le}}")], unit=unit, text=text)

    def _target(self, query: Query, ref_id: str) -> prometheus.Dataquery:
        # NOTE: no zero-argument super(): the dataclass decorator has replaced the class.
        target = Panel._target(self, query, ref_id)
        return target.format(model.PromQueryFormat.HEATMAP)

    def builder(self) -> heatmap.Panel:
        panel = self.build_on(heatmap.Panel()).calculate(False)
        panel.color(
            heatmap.HeatmapColorOptions()
            .mode(heat.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
        )
        panel.y_axis(heatmap.YAxisConfig().unit(self.unit).axis_placement("left"))
        return panel.show_legend()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Panel):
    """One number, as of now."""

    width: int = 4

    def builder(self) -> stat.Panel:
        options = build.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
        panel = self.build_on(stat.Panel()).reduce_options(options).height(4)
        return panel.graph_mode(common.BigValueGraphMode.AREA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Panel):
    """One bar for each series, as of now."""

    def builder(self) -> bargauge.Panel:
        options = build.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
        panel = self.build_on(bargauge.Panel()).reduce_options(options)
        return panel.orientation(common.VizOrientation.HORIZONTAL)


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable: the values that `label` has in `metric`."""

    name: str
    label: str
    metric: str
    has_all: bool = True
    within: str = ""

    def builder(self) -> board.QueryVariable:
        series = f"{self.metric}{{{self.within}}}" if self.within else self.metric
        query = f"label_values({series}, {self.label})"
        variable = (
            board.QueryVariable(self.name)
            .datasource(SOURCE)
            .query({"query": query, "refId": f"variable-{self.name}", "qryType": 1})
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
        if self.has_all:
            everything = VariableOption(selected=True, text="All", value="$__all")
            variable.include_all(True).all_value(".*").multi(True).current(everything)
        return variable


def dashboard(
    uid: str, title: str, text: str, sections: Sequence[Section], *choices: Choice
) -> board.Dashboard:
    """Sections below one another, their panels in rows of 24 columns."""
    made = (
        board.Dashboard(f"epserve / {title}")
        .uid(uid)
        .description(text)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .readonly()
        # Grafana's own; without any list of annotations it cannot load a dashboard.
        .annotation(
            board.AnnotationQuery()
            .name("Annotations & Alerts")
            .built_in(1)
            .datasource(DataSourceRef(type_val="grafana", uid="-- Grafana --"))
            .enable(True)
            .hide(True)
            .icon_color("rgba(0, 211, 255, 1)")
            .type("dashboard")
        )
        .link(
            board.DashboardLink("epserve").tags([TAG]).as_dropdown(True).keep_time(True)
            .include_vars(True).type(DashboardLinkType.DASHBOARDS)
        )
        .with_variable(board.DatasourceVariable("datasource").type("prometheus").label("Source"))
    )  # fmt: skip
    scope = (
        Choice("namespace", "namespace", "epserve_build_info"),
        Choice("release", "app_kubernetes_io_instance", "epserve_build_info"),
    )
    for choice in (*scope, *choices):
        made.with_variable(choice.builder())
    for section in sections:
        made.with_row(board.Row(section.title))
        for panel in section.panels:
            made.with_panel(panel.builder())
    return made
