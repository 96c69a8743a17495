"""Metrics of the gateway process."""

import asyncio
import os
from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from core.errors import STATUS, Cancelled, Draining, Mismatch, Overloaded, Unavailable
from core.metrics import (
    INTER_TOKEN_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    TOKEN_BUCKETS,
    ProcessRegistry,
    add_build_info,
)

# How a request can end: well, by its client, or by an error.
OUTCOMES = ("ok", "disconnected", "slow_reader", *(status.code for status in STATUS.values()))
GENERATION_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
GENERATION_CODES = (200, 400, 429, 500, 503)
# Those for which a choice looks for another pair.
MOVING_ERRORS = (Unavailable, Draining, Mismatch, Cancelled, Overloaded)
# Read by the library itself when it is imported.
SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def is_shared() -> bool:
    """Whether this process keeps its numbers where its supervisor adds them up."""
    return SHARED_FOLDER_VARIABLE in os.environ


class GatewayMetrics:
    """Times are as the gateway sees them; choices of one request count one by one, except
    in `requests`, `latency` and `inflight`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry() if is_shared() else ProcessRegistry()
        add_build_info(self.registry, "gateway")
        self._add_counts()
        self._add_times()

    def _add_counts(self) -> None:
        self.requests = self._counter(
            "epserve_requests_total",
            "Generation requests by outcome: ok, disconnected, or the error's code",
            "outcome",
        )
        # From the start, so that rates begin at 0.
        for outcome in OUTCOMES:
            self.requests.labels(outcome=outcome)
        self.http_responses = self._counter(
            "epserve_gateway_http_responses_total",
            "HTTP responses by path (known ones only) and status",
            "path",
            "code",
        )
        for path in GENERATION_PATHS:
            for code in GENERATION_CODES:
                self.http_responses.labels(path=path, code=str(code))
        self.inflight = self._gauge(
            "epserve_gateway_num_running_requests", "Generation requests in progress"
        )
        self.queued = self._gauge(
            "epserve_gateway_num_waiting_requests",
            "Requests that wait in the gateway for others to end",
        )
        self.kv_usage = self._gauge(
            "epserve_gateway_kv_usage_ratio",
            "Share of the decode workers' KV pages that requests hold, 0 to 1, as the router "
            "last said",
            mode="livemax",
        )
        self.tasks = self._gauge(
            "epserve_gateway_tasks", "Asyncio tasks of the process when it was last scraped"
        )
        self.moves = self._counter(
            "epserve_gateway_moves_total",
            "Choices that had to look for another pair of workers, by the failure's code",
            "reason",
        )
        for error in MOVING_ERRORS:
            self.moves.labels(reason=STATUS[error].code)
        self.prompt_tokens = self._counter(
            "epserve_gateway_prompt_tokens_total",
            "Prompt tokens of accepted requests, each prompt once",
        )
        self.cached_tokens = self._counter(
            "epserve_gateway_cached_tokens_total",
            "Prompt tokens whose KV prefill workers knew already, each prompt once",
        )
        self.output_tokens = self._counter(
            "epserve_gateway_generation_tokens_total", "Tokens received from decode workers"
        )  # fmt: skip

    def _add_times(self) -> None:
        self.request_prompt_tokens = self._histogram(
            "epserve_request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "epserve_request_generation_tokens",
            "Tokens generated for a request, all choices together",
            TOKEN_BUCKETS,
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
            "Waiting at the router for workers with room, of a choice",
            QUEUE_BUCKETS,
        )
        self.prepare_time = self._histogram(
            "epserve_gateway_prepare_seconds",
            "From the arrival of a request until it is checked, templated and tokenized",
            QUEUE_BUCKETS,
        )
        self.admission_time = self._histogram(
            "epserve_gateway_queue_time_seconds",
            "Waiting in the gateway for other requests to end", QUEUE_BUCKETS,
        )  # fmt: skip

    def exposed(self) -> CollectorRegistry:
        """What /metrics shows: the sums over all processes where several share a folder."""
        if not is_shared():
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def note_end(
        self, outcome: str, seconds: float, *, num_prompt: int, num_cached: int, num_generated: int
    ) -> None:
        """A request is over, `seconds` after its arrival; tokens of all its choices."""
        self.requests.labels(outcome=outcome).inc()
        self.latency.observe(seconds)
        self.cached_tokens.inc(num_cached)
        self.request_prompt_tokens.observe(num_prompt)
        self.request_generation_tokens.observe(num_generated)

    def count_refusal(self, outcome: str) -> None:
        """A request is over before there was anything to generate."""
        self.requests.labels(outcome=outcome).inc()

    def count_response(self, path: str, code: int) -> None:
        """`path` as metrics may name it."""
        self.http_responses.labels(path=path, code=str(code)).inc()

    def count_move(self, reason: str) -> None:
        self.moves.labels(reason=reason).inc()

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` arrived `seconds` after the ones before."""
        each = seconds / num_tokens
        for _ in range(num_tokens):
            self.inter_token.observe(each)

    def watch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Counts the loop's tasks at each scrape, where this process has metrics of its own."""
        if not is_shared():
            self.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(
        self, name: str, text: str, mode: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode=mode)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
