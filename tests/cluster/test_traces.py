"""A real cluster sends its traces to a collector: one trace a request, every stage in its place."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from proto import worker_pb2, worker_pb2_grpc
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.token_channel import token_channel
from tests.tracing.collector import Collector, SeenSpan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TRACE_IDS = (f"{number:032x}" for number in range(0xABC000, 0xABD000))
CLIENT_SPAN = "00f067aa0ba902b7"
SECRET = "zebra"
MANY = 800
# Who records which span, and under which span of which process it belongs.
PARENTS = {
    ("gateway", "tokenize"): ("gateway", "chat demo"),
    ("gateway", "assign"): ("gateway", "chat demo"),
    ("router", "epserve.router.v1.Router/Assign"): ("gateway", "assign"),
    ("router", "queue"): ("router", "epserve.router.v1.Router/Assign"),
    ("gateway", "generate"): ("gateway", "chat demo"),
    ("decode", "epserve.generate.v1.Decode/Generate"): ("gateway", "generate"),
    ("decode", "queue"): ("decode", "epserve.generate.v1.Decode/Generate"),
    ("decode", "prefill"): ("decode", "epserve.generate.v1.Decode/Generate"),
    ("prefill", "epserve.generate.v1.Prefill/Prefill"): ("decode", "prefill"),
    ("prefill", "queue"): ("prefill", "epserve.generate.v1.Prefill/Prefill"),
    ("prefill", "compute"): ("prefill", "epserve.generate.v1.Prefill/Prefill"),
    ("prefill", "transfer"): ("prefill", "epserve.generate.v1.Prefill/Prefill"),
    ("decode", "wait for kv"): ("decode", "epserve.generate.v1.Decode/Generate"),
    ("decode", "decode"): ("decode", "epserve.generate.v1.Decode/Generate"),
}


@pytest.fixture(scope="module")
def cluster(observed: Cluster) -> Cluster:
    return observed


def key(span: SeenSpan) -> tuple[str, str]:
    return span.service.removeprefix("epserve-"), span.name


def ask(cluster: Cluster, trace_id: str, **fields: Any) -> Any:
    body = {
        "model": "demo", "messages": [{"role": "user", "content": f"A {SECRET} and a cat."}],
        "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields,
    }  # fmt: skip
    headers = {
        "traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01",
        "tracestate": "vendor=1",
        "x-request-id": f"id-{trace_id[-3:]}",
    }
    return cluster.client.stream("POST", "/v1/chat/completions", json=body, headers=headers)


def trace_of(collector: Collector, trace_id: str, num_generated: int) -> list[SeenSpan]:
    """All of a trace, whose last spans come a moment after the reply."""

    def complete() -> bool:
        names = [key(span) for span in collector.trace(trace_id)]
        return ("gateway", "chat demo") in names and all(
            names.count(name) >= num_of(name, num_generated) for name in PARENTS
        )

    wait_until(complete, 60, f"{num_generated} legs of trace {trace_id}")
    time.sleep(0.5)  # should there be more than there ought to be
    return collector.trace(trace_id)


def num_of(name: tuple[str, str], num_generated: int) -> int:
    return 1 if name[1] == "tokenize" else num_generated


def check_linked(spans: list[SeenSpan]) -> SeenSpan:
    """Every span where it belongs, in time as well; the request's own."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = [span for span in spans if span.parent_id == CLIENT_SPAN]
    assert key(root) == ("gateway", "chat demo")
    assert root.kind == "SERVER"
    for span in spans:
        assert span.tracestate == "vendor=1"
        if span is root:
            continue
        parent = by_id[span.parent_id]
        assert key(parent) == PARENTS[key(span)]
        # One machine, one clock; the ends of processes' calls cross on the wire.
        assert parent.start <= span.start + 2_000_000
    return root


def read(lines: Iterator[str]) -> str:
    text = ""
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    return text


def test_one_request_is_one_trace(cluster: Cluster, collector: Collector) -> None:
    trace_id = next(TRACE_IDS)
    with ask(cluster, trace_id, n=2) as reply:
        usage = json.loads(reply.read())["usage"]
    spans = trace_of(collector, trace_id, 2)
    root = check_linked(spans)
    names = [key(span) for span in spans]
    # Both choices took all the way, and nothing happened twice.
    for name in PARENTS:
        assert names.count(name) == num_of(name, 2), name
    assert not any(span.failed for span in spans)
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "demo"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 24
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert told["http.response.status_code"] == 200
    assert told["epserve.request_id"] == f"id-{trace_id[-3:]}"
    decodes = [span for span in spans if key(span) == ("decode", "decode")]
    assert [span.attributes["epserve.num_output_tokens"] for span in decodes] == [12, 12]
    assert SECRET not in str(spans)
    assert SECRET not in str([span.attributes for span in collector.spans])


def test_the_log_has_the_trace_beside_the_request(cluster: Cluster, collector: Collector) -> None:
    trace_id = next(TRACE_IDS)
    with ask(cluster, trace_id) as reply:
        reply.read()
    trace_of(collector, trace_id, 1)
    roles = set()
    for path in cluster.log_dir.iterdir():
        for line in path.read_text(errors="replace").splitlines():
            found = re.search(r'\{.*"trace_id".*\}', line)
            if found and trace_id in line:
                event = json.loads(found[0])
                assert event["request_id"] == f"id-{trace_id[-3:]}"
                roles.add(event["role"])
    assert roles == {"gateway", "router", "prefill", "decode"}


def busy_worker(cluster: Cluster) -> worker_pb2.WorkerStatus | None:
    workers = cluster.workers(worker_pb2.ROLE_DECODE)
    return next((w for w in workers if any(rank.num_running for rank in w.ranks)), None)


def test_a_request_that_moves_stays_in_its_trace(cluster: Cluster, collector: Collector) -> None:
    trace_id = next(TRACE_IDS)
    with ask(cluster, trace_id, stream=True, max_tokens=MANY) as reply:
        lines = reply.iter_lines()
        while '"content":"' not in next(lines).replace('"content":""', ""):
            pass
        busy = wait_until(lambda: busy_worker(cluster), 60, "a worker says that it is busy")
        with token_channel(busy.identity.address, cluster.router) as peer:
            stub = worker_pb2_grpc.WorkerStub(peer)
            stub.Drain(worker_pb2.DrainRequest(grace_seconds=0), timeout=30)
            read(lines)
            stub.Drain(worker_pb2.DrainRequest(undo=True), timeout=30)
    spans = trace_of(collector, trace_id, 2)
    root = check_linked(spans)
    assert root.attributes["epserve.num_moves"] == 1
    assert root.attributes["gen_ai.usage.output_tokens"] == MANY
    assert not root.failed
    names = [key(span) for span in spans]
    for name in PARENTS:
        assert names.count(name) == num_of(name, 2), name
    legs = [span for span in spans if key(span) == ("gateway", "generate")]
    assert [leg.attributes.get("error.type") for leg in legs] == ["draining", None]
    assert [leg.failed for leg in legs] == [True, False]
    assert legs[0].attributes["epserve.decode"] == busy.identity.name
    assert legs[1].attributes["epserve.decode"] != busy.identity.name
    decodes = [span for span in spans if key(span) == ("decode", "decode")]
    counts = [span.attributes["epserve.num_output_tokens"] for span in decodes]
    assert counts[0] == legs[1].attributes["epserve.num_earlier_tokens"] > 0
    assert sum(counts) == MANY


def test_refusals_are_traced(cluster: Cluster, collector: Collector) -> None:
    trace_id = next(TRACE_IDS)
    with ask(cluster, trace_id, temperature=9) as reply:
        assert reply.status_code == 400
    wait_until(lambda: collector.trace(trace_id), 30, "the trace")
    (span,) = collector.trace(trace_id)
    assert span.name == "POST /v1/chat/completions"
    assert span.attributes["http.response.status_code"] == 400
