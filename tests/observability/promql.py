"""What is wrong with a PromQL expression, measured by the metrics that exist.

The expression is read by promql-parser, a reader of PromQL that is not ours.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import promql_parser

from scripts.metric_families import Family
from tests.observability.shipped import pod_labels

# Added by scrapes; in a cluster on one machine some of them are missing, and so match "".
SCRAPE_LABELS = frozenset({"namespace", "instance", "job", "pod"}) | pod_labels()
OF_COUNTERS = frozenset({"rate", "increase", "irate", "resets"})
OF_GAUGES = frozenset({"changes", "delta", "deriv"})

# What Grafana would put in.
VARIABLES = {
    "$__rate_interval": "10s",
    "$__interval": "5s",
    "$namespace": ".*",
    "$release": ".*",
    "$instance": ".*",
}


def substituted(expression: str, **values: str) -> str:
    """Without Grafana's variables; AssertionError for one that nobody defines."""
    for name, value in {**VARIABLES, **{f"${k}": v for k, v in values.items()}}.items():
        expression = re.sub(re.escape(name) + r"\b", lambda _, text=value: text, expression)
    assert "$" not in expression, expression
    return expression


def selectors(expression: str) -> list[str]:
    """Names of all series that it reads."""
    return [node.name for node, _ in _walk(promql_parser.parse(expression)) if _is_vector(node)]


def faults(expression: str, families: Sequence[Family]) -> list[str]:
    """Unknown metrics and labels, rates of gauges, counters without a rate, quantiles without
    `le`; and ValueError for what cannot be parsed."""
    by_series = {series: family for family in families for series in family.series}
    found: list[str] = []
    for node, above in _walk(promql_parser.parse(expression)):
        if _is_vector(node):
            family = by_series.get(node.name)
            if family is None:
                found.append(f"no metric {node.name}")
                continue
            found += _selector_faults(node, family, above)
        elif isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile":
            found += _quantile_faults(node)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            known = {label for name in selectors_below(node) for label in _labels(name, by_series)}
            unknown = set(node.modifier.labels) - known - SCRAPE_LABELS
            found += [f"by {label}: no such label" for label in sorted(unknown)]
    return found


def selectors_below(node: Any) -> list[str]:
    return [below.name for below, _ in _walk(node) if _is_vector(below)]


def _labels(name: str, by_series: dict[str, Family]) -> set[str]:
    family = by_series.get(name)
    if family is None:
        return set()
    return set(family.labels) | ({"le"} if name.endswith("_bucket") else set())


def _selector_faults(node: Any, family: Family, above: tuple[Any, ...]) -> Iterator[str]:
    known = _labels(node.name, {node.name: family}) | SCRAPE_LABELS
    for matcher in node.matchers.matchers:
        if matcher.name not in known:
            yield f"{node.name} has no label {matcher.name}"
    functions = {one.func.name for one in above if isinstance(one, promql_parser.Call)}
    is_counter = family.kind in ("counter", "histogram")
    if is_counter and not functions & OF_COUNTERS:
        yield f"{node.name} only ever grows: it wants a rate"
    if not is_counter and functions & OF_COUNTERS:
        yield f"{node.name} is a gauge: it has no rate"
    if family.kind == "histogram" and node.name == family.name:
        yield f"{node.name} is a histogram: _bucket, _sum or _count?"


def _quantile_faults(node: Any) -> Iterator[str]:
    for name in selectors_below(node.args[1]):
        if not name.endswith("_bucket"):
            yield f"histogram_quantile of {name}"
    grouped = [
        one.modifier.labels if one.modifier is not None else []
        for one, _ in _walk(node.args[1])
        if isinstance(one, promql_parser.AggregateExpr)
    ]
    if any("le" not in labels for labels in grouped):
        yield "histogram_quantile of sums over le"


def _is_vector(node: Any) -> bool:
    return isinstance(node, promql_parser.VectorSelector)


def _walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """All nodes, each with those around it."""
    yield node, above
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    below += getattr(node, "args", None) or []
    for child in below:
        if hasattr(child, "prettify"):
            yield from _walk(child, (*above, node))
