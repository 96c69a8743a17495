"""W3C trace context: what is one, and what is passed on."""

import pytest

from core.trace_context import TraceContext, parse_trace

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize(
    "text", [GOOD, f"00-{TRACE_ID}-{SPAN_ID}-00", f"00-{TRACE_ID}-{SPAN_ID}-ff",
             f"01-{TRACE_ID}-{SPAN_ID}-01", f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later"],
)  # fmt: skip
def test_what_is_passed_on(text: str) -> None:
    context = parse_trace(text, "vendor=a, other=b")
    assert context == TraceContext(text, "vendor=a, other=b")
    assert context.trace_id == TRACE_ID
    assert context.is_sampled == (text[53:55] != "00")


@pytest.mark.parametrize(
    "text",
    ["", "00", GOOD[:-1], GOOD + "-more", GOOD.upper(), f"ff-{TRACE_ID}-{SPAN_ID}-01",
     f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01", GOOD.replace("-", "_"),
     f" {GOOD}", f"01-{TRACE_ID}-{SPAN_ID}-01-" + "x" * 100, f"01-{TRACE_ID}-{SPAN_ID}-01-é",
     f"01-{TRACE_ID}-{SPAN_ID}-01-\r\n"],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert parse_trace(text) is None


@pytest.mark.parametrize("state", ["a" * 513, "a=é", "a=b\r\nx-other: c"])
def test_a_state_that_cannot_travel_is_dropped(state: str) -> None:
    assert parse_trace(GOOD, state) == TraceContext(GOOD)
