"""Spans for OpenTelemetry, sent to a collector by OTLP; nothing at all until `configure`.

    with tracing.begin("assign", Kind.CLIENT) as span:
        call(..., trace=span.context)            # what is called becomes part of the span
        if span.is_recording:
            span.note({"epserve.worker": name})
    tracing.record("queue", parent, began_ns, ended_ns)      # known only afterwards

A span's parent is the context of the running task (`TRACE`) unless another one is given. Never
put text of prompts or replies into a span.
"""

import threading
import time
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Self

from core.errors import EpserveError
from core.log import get_logger
from core.trace_context import TRACE, TraceContext
from core.version import software_version

log = get_logger("core.tracing")

Attributes = Mapping[str, str | bool | int | float | list[str]]

EXPORT_INTERVAL_MILLISECONDS = 1000
EXPORT_SECONDS = 3.0
# For the last spans when the process ends.
FLUSH_SECONDS = 2.0


class Kind(Enum):
    """As OpenTelemetry's SpanKind."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2


class Span:
    """One that is not recorded: tracing is off. `context` is for whatever is called from it."""

    is_recording = False

    def __init__(self, context: TraceContext | None) -> None:
        self.context = context

    def rename(self, name: str) -> None:
        """Gives it the name that is known only by now."""

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def fail(self, error: str) -> None:
        """Marks it as gone wrong; `error` is a status or the name of an exception."""

    def end(self, error: str = "") -> None:
        """It is over; `error` as in `fail`, "" if nothing went wrong."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error_name(error))


NOTHING = Span(None)


class _Recorder:
    """The library's provider, and what it takes to speak with it."""

    def __init__(self, resource: dict[str, str], endpoint: str, sample_ratio: float) -> None:
        """Raises ImportError without the library."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api: Any = trace
        self.propagator = TraceContextTextMapPropagator()
        self.provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not endpoint.startswith("https://"),
            timeout=EXPORT_SECONDS,
        )
        self.provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MILLISECONDS)
        )
        self.tracer = self.provider.get_tracer("epserve", software_version())

    def start(
        self,
        name: str,
        kind: Kind,
        parent: TraceContext | None,
        attributes: Attributes | None,
        start_ns: int | None,
    ) -> Any:  # noqa: ANN401 - a span of the library, which may be absent
        nothing = self.api.set_span_in_context(self.api.INVALID_SPAN)
        headers = {} if parent is None else parent._asdict()
        return self.tracer.start_span(
            name,
            context=self.propagator.extract(headers, nothing),
            kind=self.api.SpanKind[kind.name],
            attributes=attributes,
            start_time=start_ns,
            record_exception=False,
        )


class _RecordedSpan(Span):
    def __init__(
        self,
        recorder: _Recorder,
        inner: Any,  # noqa: ANN401 - as above
        tracestate: str,
    ) -> None:
        self._api = recorder.api
        self._inner = inner
        ids = inner.get_span_context()
        traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        super().__init__(TraceContext(traceparent, tracestate))
        self.is_recording = inner.is_recording()

    def rename(self, name: str) -> None:
        self._inner.update_name(name)

    def note(self, attributes: Attributes) -> None:
        self._inner.set_attributes(attributes)

    def fail(self, error: str) -> None:
        self._inner.set_attribute("error.type", error)
        self._inner.set_status(self._api.Status(self._api.StatusCode.ERROR))

    def end(self, error: str = "") -> None:
        if self.is_recording:
            self.is_recording = False
            if error:
                self.fail(error)
            self._inner.end()


_recorder: _Recorder | None = None


def configure(role: str, name: str, endpoint: str, sample_ratio: float) -> None:
    """From now on spans of this process go to the collector at `endpoint` (host:port or a URL,
    "": nowhere); of traces that begin here, a part of `sample_ratio`. ValueError where the
    libraries are not installed."""
    global _recorder
    if not endpoint:
        return
    resource = {
        "service.namespace": "epserve",
        "service.name": f"epserve-{role}",
        "service.instance.id": name or role,
        "service.version": software_version(),
    }
    try:
        _recorder = _Recorder(resource, endpoint, sample_ratio)
    except ImportError as error:
        raise ValueError(
            "--otlp-endpoint needs libraries that are not installed here: "
            "pip install 'epserve[tracing]'"
        ) from error
    log.info("traces are sent", endpoint=endpoint, sample_ratio=sample_ratio)


def shutdown() -> None:
    """Sends what is left, within bounds; nothing is recorded after this."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        # A collector that does not answer must not hold up the end of the process.
        flushing = threading.Thread(target=recorder.provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def is_on() -> bool:
    return _recorder is not None


def begin(
    name: str,
    kind: Kind = Kind.INTERNAL,
    attributes: Attributes | None = None,
    *,
    parent: TraceContext | None = None,
) -> Span:
    """A span from now on; end it, or leave its `with` block. Without a parent, neither `parent`
    nor that of the task, it begins a trace."""
    recorder = _recorder
    parent = parent or TRACE.get()
    if parent is None:
        if recorder is None:
            return NOTHING
    elif recorder is None or not parent.is_sampled:
        return Span(parent)
    inner = recorder.start(name, kind, parent, attributes, None)
    return _RecordedSpan(recorder, inner, parent.tracestate if parent else "")


def record(
    name: str,
    parent: TraceContext | None,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
) -> None:
    """A span of the past, in unix nanoseconds; none without a parent."""
    recorder = _recorder
    if recorder is None or parent is None or not parent.is_sampled:
        return
    inner = recorder.start(name, Kind.INTERNAL, parent, attributes, start_ns)
    inner.end(max(start_ns, end_ns))


def record_last(
    name: str,
    parent: TraceContext | None,
    seconds: float,
    attributes: Attributes | None = None,
) -> None:
    """The same for what has taken so long and is over now."""
    if _recorder is not None and parent is not None and parent.is_sampled:
        now_ns = time.time_ns()
        record(name, parent, now_ns - round(seconds * 1e9), now_ns, attributes)


def error_name(error: BaseException | None) -> str:
    """What a span tells of an exception; "" for none."""
    if error is None or isinstance(error, GeneratorExit):  # a stream that was read enough of
        return ""
    if isinstance(error, EpserveError):
        return error.status.code
    code = getattr(error, "code", None)  # gRPC's errors, which this package does not know
    name = code().name.lower() if callable(code) else type(error).__name__
    return str(name)
