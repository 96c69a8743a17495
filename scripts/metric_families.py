"""The metrics of every process as its own code registers them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prometheus_client import CollectorRegistry, Metric  # noqa: E402 - needs the path above

from core.metrics import ProcessRegistry  # noqa: E402
from engine.experts.expert_metrics import ExpertMetrics  # noqa: E402
from engine.link.messages import RankStats, Ready  # noqa: E402
from engine.server.worker_metrics import WorkerMetrics  # noqa: E402
from gateway.base.metrics import GatewayMetrics  # noqa: E402
from router.metrics import RouterMetrics  # noqa: E402

PROCESSES = ("gateway", "router", "prefill", "decode")
# Of the Prometheus client library, in every process.
FOREIGN_PREFIX = "process_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`name` is what a query says, without the suffixes of a histogram; `role` is among the
    labels of a worker's metrics."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    processes: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def families() -> list[Family]:
    """All of them, each once, in the order of their processes and of the code."""
    found: dict[str, Family] = {}
    for process in PROCESSES:
        for metric, labels in _metrics(_registry(process)):
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            own = labels + (("role",) if process in ("prefill", "decode") else ())
            known = found.get(name)
            found[name] = Family(
                name=name,
                kind=metric.type,
                text=metric.documentation.rstrip("."),
                labels=tuple(dict.fromkeys(own + (known.labels if known else ()))),
                processes=(*(known.processes if known else ()), process),
            )
    return list(found.values())


def _registry(process: str) -> CollectorRegistry:
    if process == "gateway":
        return GatewayMetrics().registry
    registry = ProcessRegistry()
    if process == "router":
        RouterMetrics(registry)
    else:
        WorkerMetrics(registry, process, lambda: (RankStats(),), lambda: (_ready(),))
        ExpertMetrics(registry)
    return registry


def _metrics(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    # NOTE: the registry's own list of collectors; a labelled metric without samples says its
    # labels nowhere else.
    for collector in list(registry._collector_to_names):  # noqa: SLF001
        own_labels = getattr(collector, "_labelnames", ())
        for metric in collector.collect():
            yield metric, tuple(getattr(metric, "_labelnames", ()) or own_labels)


def _ready() -> Ready:
    return Ready(
        rank=0, device="cpu", pid=1, kv_fingerprint="", page_tokens=64, max_model_len=1,
        pages_total=1, max_running=1, eos_token_ids=(), vocab_size=1, start_seconds=(("load", 1),),
    )  # fmt: skip
