"""Metrics of the gateway process."""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.multiprocess import MultiProcessCollector

from core.metrics import (
    INTER_TOKEN_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
)

# Read by the library itself when it is imported.
SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def is_shared() -> bool:
    """Whether this process keeps its numbers where its supervisor adds them up."""
    return SHARED_FOLDER_VARIABLE in os.environ


class GatewayMetrics:
    """Times are as the gateway sees them; choices of one request count one by one, except
    in `requests`, `latency` and `inflight`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        if not is_shared():
            ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "epserve_requests_total",
            "Generation requests by outcome: ok, disconnected, or the error's code",
            ["outcome"],
            registry=self.registry,
        )
        self.http_responses = Counter(
            "epserve_gateway_http_responses_total",
            "HTTP responses by path (known ones only) and status",
            ["path", "code"],
            registry=self.registry,
        )
        self.inflight = self._gauge(
            "epserve_gateway_inflight_requests", "Generation requests in progress"
        )
        self.queued = self._gauge(
            "epserve_gateway_queued_requests", "Requests that wait in the gateway for others to end"
        )
        self.tasks = self._gauge(
            "epserve_gateway_tasks", "Asyncio tasks of the process when it was last scraped"
        )
        self.moves = Counter(
            "epserve_gateway_moves_total",
            "Choices that had to look for another pair of workers, by the failure's code",
            ["reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "epserve_gateway_prompt_tokens_total",
            "Prompt tokens of accepted requests, each prompt once",
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "epserve_gateway_output_tokens_total", "Tokens received from decode workers",
            registry=self.registry,
        )
        self.time_to_first_token = self._histogram(
            "epserve_time_to_first_token_seconds",
            "From the arrival of the request to the first token of a choice",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = self._histogram(
            "epserve_inter_token_latency_seconds",
            "Between tokens; those that arrive together share the time since the one before",
            INTER_TOKEN_BUCKETS,
        )
        self.latency = self._histogram(
            "epserve_e2e_request_latency_seconds",
            "From the arrival of the request to the end of its reply",
            REQUEST_BUCKETS,
        )
        self.queue_time = self._histogram(
            "epserve_queue_time_seconds",
            "Waiting at the router for workers with room",
            QUEUE_BUCKETS,
        )

    def exposed(self) -> CollectorRegistry:
        """What /metrics shows: the sums over all processes where several share a folder."""
        if not is_shared():
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def count_move(self, reason: str) -> None:
        self.moves.labels(reason=reason).inc()

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` arrived `seconds` after the ones before."""
        each = seconds / num_tokens
        for _ in range(num_tokens):
            self.inter_token.observe(each)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
