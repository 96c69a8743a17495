"""The stages of one prefill as spans of its trace, from what the rank has measured."""

import time

from core import tracing
from core.trace_context import TRACE
from engine.link.messages import Prefilled
from engine.server.request_records import LegRecord


def record_stages(prefilled: Prefilled, leg: LegRecord) -> None:
    """Queue, then compute; the transfer, layer by layer beside the compute, ends last.

    For the call of the running task, which is answered now.
    """
    trace = TRACE.get()
    if trace is None or not tracing.is_on():
        return
    began_ns = round(leg.accepted_at * 1e9)
    computing_ns = began_ns + round(prefilled.queue_seconds * 1e9)
    computed_ns = computing_ns + round(prefilled.compute_seconds * 1e9)
    tracing.record("queue", trace, began_ns, computing_ns, {"epserve.rank": leg.rank})
    attributes = {
        "epserve.num_cached_tokens": prefilled.num_cached_tokens,
        "epserve.num_computed_tokens": prefilled.num_computed_tokens,
    }
    tracing.record("compute", trace, computing_ns, computed_ns, attributes)
    ended_ns = time.time_ns()
    transferring_ns = ended_ns - round(prefilled.transfer_seconds * 1e9)
    kv_bytes = {"epserve.kv_bytes": prefilled.kv_bytes}
    tracing.record("transfer", trace, transferring_ns, ended_ns, kv_bytes)
