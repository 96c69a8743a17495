"""Prometheus metrics of a worker, prefill or decode; each role has those that it can move.

Totals and gauges of ranks are read from their last statistics when they are scraped; only
histograms cost anything on the way.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.errors import STATUS
from core.metrics import (
    BATCH_BUCKETS,
    INTER_TOKEN_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    TRANSFER_BUCKETS,
    add_build_info,
)
from engine.link.messages import RankStats, Ready
from engine.process.process_usage import usage_of

OUTCOMES = ("ok", *sorted({status.grpc.lower() for status in STATUS.values()}))
PAGE_STATES = ("free", "owned", "cached", "quarantined")
# Name, meaning, field of RankStats; one sample a rank.
RANK_GAUGES = (
    ("epserve_num_running_requests", "Requests that a rank computes", "num_running"),
    ("epserve_num_waiting_requests", "Requests of a rank that hold no pages yet", "num_waiting"),
    (
        "epserve_num_transferring_requests",
        "Requests of a rank whose KV is under way (decode: or being computed by prefill)",
        "num_transferring",
    ),
    (
        "epserve_num_waiting_tokens",
        "Prompt tokens of a rank's requests that are not computed yet",
        "num_waiting_tokens",
    ),
)
COMMON_TOTALS = (
    ("epserve_kv_transfer_bytes", "KV bytes, sent by prefill, received by decode",
     "kv_bytes_total"),
    ("epserve_kv_transfer_failures", "Requests whose KV could not be sent, or did not arrive",
     "kv_failures_total"),
)  # fmt: skip
DECODE_TOTALS = (
    ("epserve_generation_tokens", "Tokens generated", "tokens_generated_total"),
    ("epserve_preemptions", "Requests put back for want of pages", "preemptions_total"),
    (
        "epserve_step_gap_seconds",
        "Time in which devices had nothing to do between one step and the "
        "next, though there was work",
        "step_gap_seconds_total",
    ),
)
TOKEN_SOURCES = {"prefill": ("computed", "cached"), "decode": ("transferred",)}
Family = CounterMetricFamily | GaugeMetricFamily


class WorkerMetrics:
    """`stats` and `ready` give what each rank said last and first, `quiet_seconds` how long ago it
    last ended a step; index = rank."""

    def __init__(
        self,
        registry: CollectorRegistry,
        role: str,
        stats: Callable[[], Sequence[RankStats]],
        ready: Callable[[], Sequence[Ready]] = tuple,
        quiet_seconds: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._registry = registry
        self.requests = Counter(
            "epserve_worker_requests", "Requests that are over, by outcome", ["outcome"],
            registry=registry,
        )  # fmt: skip
        for outcome in OUTCOMES:  # from the start, so that rates begin at 0
            self.requests.labels(outcome)
        self.time_to_first_token = self._histogram(
            "epserve_worker_time_to_first_token_seconds",
            "From accepting a request to its first token",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self.request_latency = self._histogram(
            "epserve_worker_e2e_request_latency_seconds",
            "From accepting a request to its end",
            REQUEST_BUCKETS,
        )
        self.queue_time = self._histogram(
            "epserve_worker_queue_time_seconds",
            "From accepting a request until it has its pages (prefill: and computing begins)",
            QUEUE_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "epserve_worker_inter_token_latency_seconds",
            "Between two tokens of a request, as they leave the worker",
            INTER_TOKEN_BUCKETS,
            exposed=role == "decode",
        )
        self._batch_size = self._histogram(
            "epserve_batch_size", "Requests of a rank in a step", BATCH_BUCKETS
        )
        self._step_seconds = self._histogram(
            "epserve_step_seconds", "Duration of a rank's step", STEP_BUCKETS
        )
        self._kv_seconds = self._kv_histogram(role)
        self.draining = Gauge(
            "epserve_worker_draining", "1 while the worker takes no new requests and finishes "
            "those it has", registry=registry,
        )  # fmt: skip
        self.stalled = Gauge(
            "epserve_worker_stalled", "1 while a rank ends no step: the worker takes no requests, "
            "and those that it had have moved", registry=registry,
        )  # fmt: skip
        self.slow = Gauge(
            "epserve_worker_slow", "1 while a rank's steps take a multiple of their usual time: "
            "the worker gets requests only when others have no room", registry=registry,
        )  # fmt: skip
        self.num_stalls = Counter(
            "epserve_worker_stalls", "Times that a worker was stalled", registry=registry
        )
        add_build_info(registry, role)
        registry.register(_RankCollector(role, stats, ready, quiet_seconds))

    def observe(self, stats: RankStats) -> None:
        """Takes over what happened since the rank's last batch."""
        for seconds in stats.step_seconds:
            self._step_seconds.observe(seconds)
        for size in stats.batch_sizes:
            self._batch_size.observe(size)
        for seconds in stats.kv_seconds:
            self._kv_seconds.observe(seconds)

    def _kv_histogram(self, role: str) -> Histogram:
        if role == "prefill":
            return self._histogram(
                "epserve_kv_transfer_seconds",
                "From the first page of a request that is sent to the last that has landed; "
                "most of it while later layers and chunks are still computed",
                TRANSFER_BUCKETS,
            )
        return self._histogram(
            "epserve_kv_wait_seconds",
            "How long a request's last KV page came after its first token: what transfer costs",
            TRANSFER_BUCKETS,
        )

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], *, exposed: bool = True
    ) -> Histogram:
        registry = self._registry if exposed else None
        return Histogram(name, text, buckets=buckets, registry=registry)


class _RankCollector(Collector):
    """Turns what each rank said of itself into metrics at scrape time."""

    def __init__(
        self,
        role: str,
        stats: Callable[[], Sequence[RankStats]],
        ready: Callable[[], Sequence[Ready]],
        quiet_seconds: Callable[[], Sequence[float]],
    ) -> None:
        self._role = role
        self._stats = stats
        self._ready = ready
        self._quiet_seconds = quiet_seconds

    def collect(self) -> Iterator[Family]:
        ranks = self._stats()
        yield from _gauges(ranks)
        yield _quiet(self._quiet_seconds())
        yield from _pages(ranks)
        yield from _totals(self._role, ranks)
        ready = self._ready()
        yield from _facts(ready)
        if self._role == "decode":
            yield _slots(ready)
            yield _drafts(ranks)
        yield from _usage(ready)


def _gauges(ranks: Sequence[RankStats]) -> Iterator[Family]:
    for name, text, field in RANK_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["rank"])
        for rank, stats in enumerate(ranks):
            gauge.add_metric([str(rank)], getattr(stats, field))
        yield gauge


def _quiet(seconds: Sequence[float]) -> Family:
    quiet = GaugeMetricFamily(
        "epserve_rank_quiet_seconds",
        "Since a rank last ended a step, or said that it is idle, which it does once a second",
        labels=["rank"],
    )
    for rank, value in enumerate(seconds):
        quiet.add_metric([str(rank)], value)
    return quiet


def _pages(ranks: Sequence[RankStats]) -> Iterator[Family]:
    pages = GaugeMetricFamily(
        "epserve_kv_pages",
        "KV pages: free, owned by requests, cached (prefixes that no request uses), quarantined "
        "(a peer may still write into them)",
        labels=["rank", "state"],
    )
    usage = GaugeMetricFamily(
        "epserve_kv_usage_ratio",
        "Share of a rank's KV pages that requests own or that are quarantined, 0 to 1",
        labels=["rank"],
    )
    for rank, stats in enumerate(ranks):
        for state in PAGE_STATES:
            count = getattr(stats, f"pages_{state}")
            # What is cached may be taken at any time, and counts as free in the statistics;
            # here the states add up to all pages.
            pages.add_metric(
                [str(rank), state], count - stats.pages_cached if state == "free" else count
            )
        held = stats.pages_owned + stats.pages_quarantined
        usage.add_metric([str(rank)], held / stats.pages_total if stats.pages_total else 0.0)
    yield from (pages, usage)


def _totals(role: str, ranks: Sequence[RankStats]) -> Iterator[Family]:
    tokens = CounterMetricFamily(
        "epserve_prefill_tokens",
        "Prompt tokens by where their KV came from: computed, cached (found in the prefix tree), "
        "transferred (from a prefill worker)",
        labels=["source"],
    )
    for source in TOKEN_SOURCES[role]:
        tokens.add_metric([source], sum(getattr(s, f"tokens_{source}_total") for s in ranks))
    yield tokens
    for name, text, field in COMMON_TOTALS + (DECODE_TOTALS if role == "decode" else ()):
        yield CounterMetricFamily(name, text, value=sum(getattr(s, field) for s in ranks))


def _facts(ready: Sequence[Ready]) -> Iterator[Family]:
    phases = GaugeMetricFamily(
        "epserve_start_seconds",
        "How long each phase of a rank's start took: python (interpreter and imports), group, "
        "plan (of memory), dispatchers, load, compile (kernels, where the cache has none), memory "
        "(KV pages), warm_up (passes of all lengths), graphs (decode steps recorded), transfer "
        "(pages registered), peers (the slowest rank of the group)",
        labels=["rank", "phase"],
    )
    for rank in ready:
        for phase, seconds in rank.start_seconds:
            phases.add_metric([str(rank.rank), phase], seconds)
    yield phases
    memory = GaugeMetricFamily(
        "epserve_memory_bytes",
        "Memory of a rank's device by what it is for: as it was planned, and as it turned out "
        "once loaded",
        labels=["rank", "term", "state"],
    )
    for rank in ready:
        for term, planned, used in rank.memory:
            memory.add_metric([str(rank.rank), term, "planned"], planned)
            memory.add_metric([str(rank.rank), term, "used"], used)
    yield memory
    info = GaugeMetricFamily(
        "epserve_kv_info",
        "Always 1; the labels say how many tokens a KV page has and how many pages a rank",
        labels=["rank", "device", "page_tokens", "num_pages"],
    )
    for rank in ready:
        labels = (rank.rank, rank.device, rank.page_tokens, rank.pages_total)
        info.add_metric([str(label) for label in labels], 1)
    yield info


def _slots(ready: Sequence[Ready]) -> Family:
    slots = GaugeMetricFamily(
        "epserve_max_running_requests",
        "Requests that a rank may have at once, those that wait for KV included",
        labels=["rank"],
    )
    for rank in ready:
        slots.add_metric([str(rank.rank)], rank.max_running)
    return slots


def _drafts(ranks: Sequence[RankStats]) -> Family:
    drafts = CounterMetricFamily(
        "epserve_draft_tokens",
        "Drafts that were verified, by position after a request's last token, 1 first, and "
        "outcome: accepted (a token without a step of its own), rejected. One with outcome of "
        "position 1 is a step of a request that drafts",
        labels=["position", "outcome"],
    )
    proposed, accepted = (
        [*map(sum, zip_longest(*told, fillvalue=0))]
        for told in (
            [stats.drafts_proposed_total for stats in ranks],
            [stats.drafts_accepted_total for stats in ranks],
        )
    )
    for position, (num_all, num_right) in enumerate(zip(proposed, accepted, strict=True), 1):
        drafts.add_metric([str(position), "accepted"], num_right)
        drafts.add_metric([str(position), "rejected"], num_all - num_right)
    return drafts


def _usage(ready: Sequence[Ready]) -> Iterator[Family]:
    seconds = CounterMetricFamily(
        "epserve_rank_cpu_seconds", "CPU time of a rank's process", labels=["rank"]
    )
    memory = GaugeMetricFamily(
        "epserve_rank_memory_bytes", "Resident memory of a rank's process", labels=["rank"]
    )
    for rank in ready:
        usage = usage_of(rank.pid)
        if usage is not None:
            seconds.add_metric([str(rank.rank)], usage.cpu_seconds)
            memory.add_metric([str(rank.rank)], usage.resident_bytes)
    yield from (seconds, memory)
