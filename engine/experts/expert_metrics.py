"""Metrics about experts: how evenly they are loaded, how they move."""

from prometheus_client import CollectorRegistry, Counter, Gauge

OUTCOMES = ("done", "restored", "broken", "refused")


class ExpertMetrics:
    """Of node 0 of an EP group, which speaks for all of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.balancedness = Gauge(
            "epserve_expert_balancedness",
            "Mean over largest load of the EP group's ranks in an MoE layer, over the last window: "
            "1 is even",
            ["layer"],
            registry=registry,
        )
        self.rebalances = Counter(
            "epserve_expert_rebalances",
            "Attempts to move experts, by outcome; after `restored` the old placement is in force",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.rebalances.labels(outcome)
        self.moved_bytes = Counter(
            "epserve_expert_moved_bytes",
            "Weights of experts that have travelled between the group's ranks",
            registry=registry,
        )
        self.placement_version = Gauge(
            "epserve_expert_placement_version",
            "0 at the start, one more with each placement put in force",
            registry=registry,
        )
