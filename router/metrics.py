"""Metrics of the router process."""

from collections import Counter as Tally
from collections.abc import Collection, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.metrics import QUEUE_BUCKETS, add_build_info
from router.discovery.members import Member
from router.workers.worker import Standing, Worker, WorkerState, role_name

ROLES = ("prefill", "decode")
OUTCOMES = ("ok", "cancelled", "invalid", "not_found", "overloaded", "unavailable", "error")


class RouterMetrics:
    """All label values exist from the start, so that rates begin at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._assigns = Counter(
            "epserve_router_assign_total", "Assign calls, by outcome", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.assign_seconds = Histogram(
            "epserve_router_assign_seconds",
            "Duration of Assign calls that got a pair, the wait for room included",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._workers = Gauge(
            "epserve_router_workers", "Workers that were ever seen and are not forgotten, by state",
            ["role", "state"], registry=registry,
        )  # fmt: skip
        self._members = Gauge(
            "epserve_router_members",
            "Workers that discovery names, by standing: open; held (its pod is not ready); closing "
            "(its pod is terminating)",
            ["role", "standing"], registry=registry,
        )  # fmt: skip
        self.num_discovery_failures = Counter(
            "epserve_router_discovery_failures_total",
            "Calls to the Kubernetes API, or look-ups of names, that failed",
            registry=registry,
        )
        self.num_rejected = Gauge(
            "epserve_router_rejected_workers",
            "Workers that are up but get no requests: none of the other role matches them, or "
            "what they say cannot be",
            registry=registry,
        )
        self.num_waiting = Gauge(
            "epserve_router_num_waiting_requests", "Assign calls that wait for room",
            registry=registry,
        )  # fmt: skip
        self._prefix_pages = Counter(
            "epserve_router_prefix_pages_total",
            "Full pages of assigned prompts: matched = expected in the chosen worker's tree",
            ["result"], registry=registry,
        )  # fmt: skip
        for outcome in OUTCOMES:
            self._assigns.labels(outcome)
        for result in ("matched", "missed"):
            self._prefix_pages.labels(result)
        self.show_workers(())
        self.show_members(())
        add_build_info(registry, "router")

    def count_assign(self, outcome: str) -> None:
        self._assigns.labels(outcome).inc()

    def count_prefix(self, *, num_matched: int, num_pages: int) -> None:
        self._prefix_pages.labels("matched").inc(num_matched)
        self._prefix_pages.labels("missed").inc(num_pages - num_matched)

    def show_members(self, members: Collection[Member]) -> None:
        tally = Tally((role_name(member.role), member.standing) for member in members)
        for role in ROLES:
            for standing in Standing:
                self._members.labels(role, standing.name.lower()).set(tally[role, standing])

    def show_workers(self, workers: Sequence[Worker]) -> None:
        tally = Tally((worker.role_name, worker.state) for worker in workers)
        for role in ROLES:
            for state in WorkerState:
                self._workers.labels(role, state.value).set(tally[role, state])
