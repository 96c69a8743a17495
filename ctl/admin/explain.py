"""`ctl explain`: what became of a request, and why it went where it went."""

from typing import Annotated, Any

import typer

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.explain_text import print_explanation
from ctl.admin.message_dict import message_dict
from ctl.base.output import Output, show
from proto import router_pb2, worker_pb2


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
    show(describe(request_id, reply), output, print_explanation)


def describe(request_id: str, reply: router_pb2.AdminExplainResponse) -> dict[str, Any]:
    """The reply as plain data."""
    return {
        "request_id": request_id,
        "assignments": [_assignment(each) for each in reply.assignments],
        "legs": [_leg(each) for each in reply.legs],
        "unreachable": list(reply.unreachable),
    }


def _assignment(record: router_pb2.AssignmentRecord) -> dict[str, Any]:
    return message_dict(record) | {"candidates": [_candidate(each) for each in record.candidates]}


def _candidate(candidate: router_pb2.Candidate) -> dict[str, Any]:
    told = _with_worker(candidate)
    return told | {"score": told.pop("total")}


def _leg(leg: worker_pb2.RequestLeg) -> dict[str, Any]:
    return _with_worker(leg) | {"peer": leg.peer.name}


def _with_worker(message: router_pb2.Candidate | worker_pb2.RequestLeg) -> dict[str, Any]:
    """The worker's name as `worker`, its address and epoch among the other fields."""
    told = message_dict(message)
    worker = told.pop("worker")
    return {"worker": worker.pop("name"), **worker, **told}
