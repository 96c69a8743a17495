"""Spans as a collector gets them, and what is left of them when there is none."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from core import tracing
from core.errors import Overloaded
from core.trace_context import TRACE, TraceContext
from tests.tracing.collector import Collector, collecting

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = TraceContext(f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=x")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 30)
    with collecting() as collector:
        yield collector
        tracing.shutdown()


def configure(collector: Collector, ratio: float = 1.0) -> None:
    tracing.configure("router", "router-1", collector.address, ratio)


def run(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_off_costs_nothing_and_passes_the_trace_on() -> None:
    assert not tracing.is_on()
    assert tracing.begin("a") is tracing.NOTHING
    with tracing.begin("a", tracing.Kind.CLIENT, parent=CLIENT) as span:
        assert span.context == CLIENT
        assert not span.is_recording
    tracing.record_last("b", CLIENT, 1.0)
    token = TRACE.set(CLIENT)
    try:
        assert tracing.begin("a").context == CLIENT
    finally:
        TRACE.reset(token)


def test_spans_arrive_as_they_were(collector: Collector) -> None:
    configure(collector)
    before = time.time_ns()
    with tracing.begin("outer", tracing.Kind.SERVER, {"a": 1}, parent=CLIENT) as outer:
        assert outer.context is not None
        assert outer.context.tracestate == "vendor=x"
        inner = tracing.begin("inner", parent=outer.context)
        inner.note({"b": ["x", "y"]})
        with pytest.raises(Overloaded), inner:
            raise Overloaded("no room for the user's secret")
        outer.rename("renamed")
        tracing.record_last("past", outer.context, 0.25, {"c": True})
    outer.end("late")  # it is over already
    outer.note({"late": 1})
    tracing.shutdown()
    spans = {span.name: span for span in collector.trace(TRACE_ID)}
    assert set(spans) == {"renamed", "inner", "past"}
    root = spans["renamed"]
    assert (root.parent_id, root.kind, root.failed) == (SPAN_ID, "SERVER", False)
    assert (root.service, root.tracestate) == ("epserve-router", "vendor=x")
    assert root.attributes == {"a": 1}
    assert spans["inner"].parent_id == spans["past"].parent_id == root.span_id
    assert spans["inner"].failed
    assert spans["inner"].attributes == {"b": ["x", "y"], "error.type": "overloaded"}
    assert spans["past"].end - spans["past"].start == 250_000_000
    assert before <= root.start <= spans["inner"].start <= spans["inner"].end <= root.end
    assert "secret" not in str(collector.spans)


def test_what_others_decided_not_to_record_is_not(collector: Collector) -> None:
    configure(collector)
    parent = TraceContext(f"00-{TRACE_ID}-{SPAN_ID}-00")
    with tracing.begin("a", parent=parent) as span:
        assert not span.is_recording
        assert span.context == parent
        tracing.record_last("b", span.context, 1.0)
    tracing.shutdown()
    assert not collector.spans


def test_a_part_of_the_traces(collector: Collector) -> None:
    configure(collector, ratio=0.25)
    for _ in range(400):
        with tracing.begin("root") as root:
            tracing.begin("child", parent=root.context).end()
    tracing.shutdown()
    by_name = [span.name for span in collector.spans]
    assert by_name.count("root") == by_name.count("child")
    assert 50 < by_name.count("root") < 150


def test_a_collector_that_is_not_there_holds_nothing_up() -> None:
    tracing.configure("router", "router-1", "127.0.0.1:1", 1.0)
    began = time.monotonic()
    for _ in range(100):
        tracing.begin("lost").end()
    assert time.monotonic() - began < tracing.EXPORT_SECONDS
    tracing.shutdown()
    assert time.monotonic() - began < tracing.FLUSH_SECONDS + 15


def test_without_the_libraries_it_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from core import tracing\n"
        "tracing.configure('router', 'r', '', 1.0)\n"
        "try: tracing.configure('router', 'r', 'host:1', 1.0)\n"
        "except ValueError as error: print(error)"
    )
    result = run(code)
    assert "pip install 'epserve[tracing]'" in result.stdout


def test_nothing_is_imported_while_it_is_off() -> None:
    code = "import sys; from core import tracing; print('opentelemetry' in sys.modules)"
    result = run(code)
    assert result.stdout.strip() == "False"
