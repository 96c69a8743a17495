"""Experts: how evenly they are loaded, how they move, how long steps take."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from scripts.dashboards.panel import (
    Bars,
    Figure,
    Heat,
    Lines,
    Query,
    Section,
    dashboard,
    quantile,
    quantiles,
    rate,
    select,
)

BALANCE = "epserve_expert_balancedness"


def experts() -> Dashboard:
    return dashboard(
        "epserve-experts",
        "Experts and balance",
        "How evenly tokens are spread over the ranks of an EP group, and what a step takes.",
        [
            Section("Balance", _balance()),
            Section("Rebalancing", _moves()),
            Section("Steps", _steps()),
        ],
    )


def _balance() -> list[Lines | Bars | Figure]:
    text = "Mean over largest load of the ranks, a layer: 1 is even, 1 / ranks is one for all."
    return [
        Lines(
            title="Balancedness, mean and worst layer", unit="percentunit", most=1, text=text,
            queries=[
                Query(f"avg by (instance) ({select(BALANCE)})", "{{instance}} mean"),
                Query(f"min by (instance) ({select(BALANCE)})", "{{instance}} worst"),
            ],
        ),
        Bars(title="Balancedness by layer", unit="percentunit", text=text,
             queries=[Query(f"min by (layer) ({select(BALANCE)})", "layer {{layer}}")]),
        Lines(title="Placement", queries=[Query(select("epserve_expert_placement_version"),
                                                "{{role}} {{instance}}")],
              text="One more with each placement put in force."),
    ]  # fmt: skip


def _moves() -> list[Lines]:
    return [
        Lines(
            title="Rebalances",
            queries=[Query(
                f"sum by (outcome) (increase({select('epserve_expert_rebalances_total')}[10m]))",
                "{{outcome}}",
            )],
            text="In the last ten minutes.",
        ),
        Lines(title="Weights on the way", unit="Bps",
              queries=[Query(rate("epserve_expert_moved_bytes_total", "role, instance"),
                             "{{role}} {{instance}}")]),
        Lines(title="Time between tokens, p99", unit="s",
              queries=[Query(quantile(0.99, "epserve_inter_token_latency_seconds"), "p99")],
              text="Moving experts must not be felt."),
    ]  # fmt: skip


def _steps() -> list[Lines | Heat]:
    return [
        Lines(title="A decode step", unit="s",
              queries=quantiles("epserve_step_seconds", 'role="decode"')),
        Heat.of("Steps of decode workers", "epserve_step_seconds", 'role="decode"'),
        Heat.of("Requests in a decode step", "epserve_batch_size", 'role="decode"', unit="short"),
        Lines(title="A prefill step", unit="s",
              queries=quantiles("epserve_step_seconds", 'role="prefill"')),
        Heat.of("Steps of prefill workers", "epserve_step_seconds", 'role="prefill"'),
        Lines(title="Steps a second",
              queries=[Query(rate("epserve_step_seconds_count", "role, instance"),
                             "{{role}} {{instance}}")]),
    ]  # fmt: skip
