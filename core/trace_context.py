"""W3C trace context: which trace the work at hand belongs to, whoever records it.

It is taken from each request and passed on with every call made for it, also by processes that
record nothing themselves.
"""

import re
from contextvars import ContextVar
from typing import NamedTuple

TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"

# version "-" trace id "-" id of the parent's span "-" flags; later versions may add more.
TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACEPARENT_CHARACTERS = 128
MAX_TRACESTATE_CHARACTERS = 512


class TraceContext(NamedTuple):
    """Both headers as they travel; `tracestate` may be empty."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether who began the trace wants it recorded."""
        return bool(int(self.traceparent[53:55], 16) & 1)


# Of the call or request that the running task serves.
TRACE: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def parse_trace(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """None for what is no trace context. A tracestate that cannot be passed on is dropped."""
    found = None
    if len(traceparent) <= MAX_TRACEPARENT_CHARACTERS and traceparent.isascii():
        found = TRACEPARENT.fullmatch(traceparent)
    if found is None or not traceparent.isprintable():
        return None
    version, trace_id, span_id, _, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    is_fit = tracestate.isascii() and tracestate.isprintable()
    if not is_fit or len(tracestate) > MAX_TRACESTATE_CHARACTERS:
        tracestate = ""
    return TraceContext(traceparent, tracestate.strip())
