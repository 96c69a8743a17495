"""Prometheus metrics of a worker, prefill or decode (which of the two tells the scrape job).

Totals and gauges of ranks are read from their last statistics when somebody scrapes; only
histograms cost anything on the way.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.metrics import (
    BATCH_BUCKETS,
    INTER_TOKEN_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
from engine.messages import RankStats

PAGE_STATES = ("free", "owned", "cached", "quarantined")
Metric = CounterMetricFamily | GaugeMetricFamily


class WorkerMetrics:
    """`stats` gives the ranks' last statistics, index = rank."""

    def __init__(
        self, registry: CollectorRegistry, stats: Callable[[], Sequence[RankStats]]
    ) -> None:
        self.requests = Counter(
            "epserve_requests", "Requests that are over, by outcome", ["outcome"], registry=registry
        )
        self.time_to_first_token = Histogram(
            "epserve_time_to_first_token_seconds",
            "From accepting a request to its first token",
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "epserve_inter_token_latency_seconds",
            "Between two tokens of a request, at this worker",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.request_latency = Histogram(
            "epserve_e2e_request_latency_seconds",
            "From accepting a request to its end",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.queue_time = Histogram(
            "epserve_queue_time_seconds",
            "From accepting a request to the start of work on it",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._batch_size = Histogram(
            "epserve_batch_size", "Requests in a step", buckets=BATCH_BUCKETS, registry=registry
        )
        self._step_seconds = Histogram(
            "epserve_step_seconds", "Duration of a step", buckets=STEP_BUCKETS, registry=registry
        )
        registry.register(_RankCollector(stats))

    def observe(self, stats: RankStats) -> None:
        """Takes over the steps since the rank's last batch."""
        for seconds in stats.step_seconds:
            self._step_seconds.observe(seconds)
        for size in stats.batch_sizes:
            self._batch_size.observe(size)


class _RankCollector(Collector):
    """Turns the last statistics of each rank into metrics at scrape time."""

    def __init__(self, stats: Callable[[], Sequence[RankStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        ranks = self._stats()
        yield from _gauges(ranks)
        yield from _totals(ranks)


def _gauges(ranks: Sequence[RankStats]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "epserve_num_running_requests", "Requests in the batch of a rank", labels=["rank"]
    )
    waiting = GaugeMetricFamily(
        "epserve_num_waiting_requests", "Requests of a rank not in its batch yet", labels=["rank"]
    )
    pages = GaugeMetricFamily("epserve_kv_pages", "KV pages by state", labels=["rank", "state"])
    for rank, stats in enumerate(ranks):
        running.add_metric([str(rank)], stats.num_running)
        waiting.add_metric([str(rank)], stats.num_waiting)
        for state in PAGE_STATES:
            count = getattr(stats, f"pages_{state}")
            # What is cached may be taken at any time, and counts as free in the statistics;
            # here the states add up to all pages.
            pages.add_metric(
                [str(rank), state], count - stats.pages_cached if state == "free" else count
            )
    yield from (running, waiting, pages)


def _totals(ranks: Sequence[RankStats]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "epserve_prefill_tokens", "Prompt tokens by where their KV came from", labels=["source"]
    )
    for source in ("computed", "cached", "transferred"):
        tokens.add_metric([source], sum(getattr(s, f"tokens_{source}_total") for s in ranks))
    yield tokens
    for name, help_text, field in (
        ("epserve_generation_tokens", "Tokens generated", "tokens_generated_total"),
        ("epserve_kv_transfer_bytes", "KV bytes sent or received", "kv_bytes_total"),
        ("epserve_kv_transfer_seconds", "Time KV transfers took", "kv_seconds_total"),
        ("epserve_preemptions", "Requests put back for want of pages", "preemptions_total"),
        ("epserve_steps", "Steps taken", "num_steps"),
    ):
        yield CounterMetricFamily(name, help_text, value=sum(getattr(s, field) for s in ranks))
