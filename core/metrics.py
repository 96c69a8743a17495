"""What the metrics of all processes have in common: buckets, registry, the server that exposes it.

Metrics themselves are defined in one file per process (`router/metrics.py`, ...); all of them are
listed in `docs/metrics.md`.
"""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)

from core.metrics_server import ScrapeServer
from core.version import software_version

# No series beside each counter and histogram that tells when it began.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Seconds. The OpenTelemetry GenAI boundaries, finer where a small model on a fast machine is.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
)  # fmt: skip
QUEUE_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
STEP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.2, 0.4,
    0.8, 1.6, 3.2,
)  # fmt: skip
TRANSFER_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
BATCH_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip


class ProcessRegistry(CollectorRegistry):
    """For one process: CPU, memory and files of it come by themselves; `labels` are added to
    every sample."""

    def __init__(self, **labels: str) -> None:
        super().__init__()
        self._labels = labels
        ProcessCollector(registry=self)

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            labelled = Metric(metric.name, metric.documentation, metric.type)
            labelled.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
            ]
            yield labelled


def add_build_info(registry: CollectorRegistry, role: str) -> None:
    """`role` of the process: gateway, router, prefill or decode."""
    Gauge(
        "epserve_build_info",
        "Always 1; the labels say what this process is, and of which version",
        ["role", "version"],
        registry=registry,
        multiprocess_mode="livemax",
    ).labels(role, software_version()).set(1)


class MetricsServer:
    """A running `/metrics` endpoint; `port` is the bound one, -1 when switched off."""

    def __init__(self, server: ScrapeServer | None) -> None:
        self._server = server
        self.port: int = server.server_port if server is not None else -1

    def close(self) -> None:
        """Stops serving and frees the port; calling it again does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def serve(port: int, registry: CollectorRegistry, host: str = "127.0.0.1") -> MetricsServer:
    """Serves `registry` over HTTP from a daemon thread. `port` 0 takes a free one, -1 switches the
    endpoint off; OSError when it is taken."""
    if port < 0:
        return MetricsServer(None)
    return MetricsServer(ScrapeServer.start(host, port, registry))
