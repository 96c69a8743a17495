"""The stages of one Generate call as spans of its trace.

    queue -> prefill -> wait for kv -> decode -> (put back: prefill ->) ... -> end

Nothing is done at a token. The span of the prefill stage is that of the call to the prefill
worker, see `prefill_legs`.
"""

import time
from enum import Enum

from core import tracing
from core.trace_context import TRACE, TraceContext
from engine.server.request_records import LegRecord


class Stage(Enum):
    """By the names of their spans."""

    QUEUE = "queue"  # for room on the rank
    PREFILL = "prefill"
    WAIT_FOR_KV = "wait for kv"
    DECODE = "decode"


class CallSpans:
    """Made in the context of the call; used from anywhere."""

    def __init__(self) -> None:
        self.parent: TraceContext | None = TRACE.get()
        self._is_on = self.parent is not None and tracing.is_on()
        self._stage = Stage.QUEUE
        self._since_ns = time.time_ns() if self._is_on else 0

    def enter(self, stage: Stage) -> None:
        """The stage until now is over."""
        if self._is_on:
            self._record({})
            self._stage, self._since_ns = stage, time.time_ns()

    def end(self, prefill_call: LegRecord) -> None:
        """No one listens any more."""
        if self._is_on:
            attributes: tracing.Attributes = {}
            if self._stage is Stage.DECODE:
                attributes = {
                    "epserve.rank": prefill_call.rank,
                    "epserve.num_output_tokens": prefill_call.num_output_tokens,
                    "epserve.num_preemptions": max(0, prefill_call.num_attempts - 1),
                    "epserve.finish": prefill_call.finish,
                }
            self._record(attributes)
            self._is_on = False

    def _record(self, attributes: tracing.Attributes) -> None:
        if self._stage is not Stage.PREFILL:
            name = self._stage.value
            tracing.record(name, self.parent, self._since_ns, time.time_ns(), attributes)
