"""`ctl explain`: what became of a request, and why it went where it went."""

from typing import Annotated, Any

import typer

from ctl.connection import AdminConnection, Output, admin_command, print_json
from ctl.explain_text import print_explanation
from ctl.tables import role_word
from ctl.terminal import make_console
from proto import router_pb2, worker_pb2

_DIGITS = 9  # of seconds


@admin_command
async def explain(
    admin: AdminConnection,
    request_id: Annotated[
        str,
        typer.Argument(
            help="The `id` of a reply (chatcmpl-..., cmpl-...), of one of its choices (...-0), or "
            "the `x-request-id` of its headers",
            show_default=False,
        ),
    ],
    output: Output = "table",
) -> None:
    """Explains a request: scores of its route, waits, cached tokens, KV transfer, finish.

    The router and each worker remember the last 4096 requests that are over, and all open ones.
    """
    request = router_pb2.AdminExplainRequest(request_id=request_id)
    reply = await admin.call(admin.stub.ExplainRequest, request)
    report = describe(request_id, reply)
    if output == "json":
        print_json(report)
    else:
        print_explanation(report, make_console())


def describe(request_id: str, reply: router_pb2.AdminExplainResponse) -> dict[str, Any]:
    """The reply as plain data."""
    return {
        "request_id": request_id,
        "assignments": [_assignment(each) for each in reply.assignments],
        "legs": [_leg(each) for each in reply.legs],
        "unreachable": list(reply.unreachable),
    }


def _assignment(record: router_pb2.AssignmentRecord) -> dict[str, Any]:
    return {
        "leg_id": record.leg_id,
        "at": record.at,
        "queue_seconds": round(record.queue_seconds, _DIGITS),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_matched_pages": record.num_matched_pages,
        "outcome": record.outcome,
        "candidates": [_candidate(each) for each in record.candidates],
    }


def _candidate(candidate: router_pb2.Candidate) -> dict[str, Any]:
    return {
        "worker": candidate.worker.name,
        "address": candidate.worker.address,
        "epoch": candidate.worker.epoch,
        "role": role_word(candidate.role),
        "chosen": candidate.chosen,
        "rejected_by": candidate.rejected_by,
        "score": round(candidate.total, 6),
        "parts": [
            {"scorer": part.scorer, "score": round(part.score, 6), "weight": part.weight}
            for part in candidate.parts
        ],
    }


def _leg(leg: worker_pb2.RequestLeg) -> dict[str, Any]:
    durations = ("queue", "compute", "transfer", "first_token", "total")
    return {
        "leg_id": leg.leg_id,
        "worker": leg.worker.name,
        "role": role_word(leg.worker.role),
        "address": leg.worker.address,
        "epoch": leg.worker.epoch,
        "rank": leg.rank,
        "accepted_at": leg.accepted_at,
        "num_prompt_tokens": leg.num_prompt_tokens,
        "num_earlier_tokens": leg.num_earlier_tokens,
        "num_cached_tokens": leg.num_cached_tokens,
        "num_computed_tokens": leg.num_computed_tokens,
        "num_output_tokens": leg.num_output_tokens,
        **{f"{n}_seconds": round(getattr(leg, f"{n}_seconds"), _DIGITS) for n in durations},
        "kv_bytes": leg.kv_bytes,
        "num_preemptions": leg.num_preemptions,
        "num_attempts": leg.num_attempts,
        "num_steps": leg.num_steps,
        "finish": leg.finish,
        "peer": leg.peer.name,
    }
