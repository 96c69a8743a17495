"""Traces through the gateway: passed on as they are, or recorded with what became of a request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from core import tracing
from core.errors import Unavailable
from core.trace_context import TraceContext
from tests.gateway.conftest import MODEL, Gateway
from tests.tracing.collector import SeenSpan, collecting

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
Recorded = Callable[[], Awaitable[dict[str, SeenSpan]]]
HEADERS = {
    "traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01",
    "tracestate": "vendor=x, other=y",
}


async def ask(gateway: Gateway, headers: dict[str, str] = HEADERS, **fields: object) -> int:
    body = {"model": MODEL, "prompt": "plain", "temperature": 0, **fields}
    reply = await gateway.client.post("/v1/completions", json=body, headers=headers)
    assert "traceparent" not in reply.headers
    return reply.status_code


async def test_it_is_passed_on_while_nothing_is_recorded(gateway: Gateway) -> None:
    first, second = gateway.cluster.first, gateway.cluster.second
    first.plan.fail_after, first.plan.error = 3, Unavailable("gone", failed_epoch=first.epoch)
    assert await ask(gateway) == 200
    assert await ask(gateway, {}) == 200
    told = TraceContext(HEADERS["traceparent"], HEADERS["tracestate"])
    assert first.traces == [told, None]
    assert second.traces == [told, None]


@pytest.mark.parametrize("text", ["00-0-0-0", "hello", HEADERS["traceparent"].upper()])
async def test_what_is_no_trace_is_not_passed_on(gateway: Gateway, text: str) -> None:
    assert await ask(gateway, HEADERS | {"traceparent": text}) == 200
    assert gateway.cluster.first.traces == [None]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """All spans of the trace by name, the request's own as "request", once that is over."""
    monkeypatch.setattr(tracing, "EXPORT_INTERVAL_MILLISECONDS", 20)
    with collecting() as collector:
        tracing.configure("gateway", "gateway-0", collector.address, 1.0)

        async def wait() -> dict[str, SeenSpan]:
            async with asyncio.timeout(20):
                while True:
                    spans = {span.name: span for span in collector.trace(TRACE_ID)}
                    for span in list(spans.values()):
                        if span.parent_id == CLIENT_SPAN:
                            return {"request": span, **spans}
                    await asyncio.sleep(0.02)

        yield wait
        tracing.shutdown()


async def test_a_stop_string_is_no_failure(gateway: Gateway, recorded: Recorded) -> None:
    assert await ask(gateway, stop=["dog"]) == 200
    spans = await recorded()
    request = spans["request"]
    assert request.name == f"text_completion {MODEL}"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request.attributes["epserve.outcome"] == "ok"
    assert not any(spans[name].failed for name in ("request", "tokenize", "assign", "generate"))
    assert "dog" not in str(spans)


async def test_errors_have_their_codes(gateway: Gateway, recorded: Recorded) -> None:
    gateway.cluster.router.errors.append(Unavailable("the secret of the router"))
    gateway.cluster.router.down |= {"epoch-decode-0", "epoch-decode-1"}
    assert await ask(gateway) == 503
    spans = await recorded()
    assert spans["request"].failed
    assert spans["request"].attributes["http.response.status_code"] == 503
    assert spans["request"].attributes["epserve.outcome"] == "unavailable"
    assert spans["assign"].attributes["error.type"] == "unavailable"
    assert "secret" not in str(spans)


async def test_a_client_that_leaves(gateway: Gateway, recorded: Recorded) -> None:
    gateway.cluster.first.plan.hang_after = 2
    asking = asyncio.create_task(ask(gateway))
    await asyncio.wait_for(gateway.cluster.first.started.wait(), 20)
    asking.cancel()
    await asyncio.wait_for(gateway.cluster.first.cancelled.wait(), 20)
    spans = await recorded()
    assert spans["request"].attributes["epserve.outcome"] == "disconnected"
    assert spans["request"].attributes["http.response.status_code"] == 499
    assert spans["request"].attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert not spans["request"].failed
