"""`ctl explain`: what became of a request, and why it went where it went."""

from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.message_dict import message_dict
from ctl.base.output import Output, show
from ctl.base.tables import format_duration, make_table
from proto import router_pb2, worker_pb2

# Key of a leg, the line's title, and how the value reads; roles that have no such thing show "-".
_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("role", "role", str),
    ("rank", "rank", str),
    ("accepted_at", "accepted", lambda at: _time(at)),
    ("queue_seconds", "waited for a rank", format_duration),
    ("num_prompt_tokens", "prompt tokens", str),
    ("num_earlier_tokens", "tokens of earlier calls", str),
    ("num_cached_tokens", "of these cached", str),
    ("num_computed_tokens", "computed", str),
    ("compute_seconds", "computing", format_duration),
    ("kv_bytes", "KV moved", decimal),
    ("transfer_seconds", "moving KV", format_duration),
    ("num_attempts", "prefill attempts", str),
    ("num_preemptions", "preemptions", str),
    ("first_token_seconds", "first token after", format_duration),
    ("num_steps", "decode steps", str),
    ("num_output_tokens", "output tokens", str),
    ("num_accepted_drafts", "drafts accepted", str),
    ("num_rejected_drafts", "drafts rejected", str),
    ("total_seconds", "over after", format_duration),
    ("finish", "finish", lambda finish: finish or "still open"),
)
_DECODE_ONLY = frozenset(
    {
        *("num_attempts", "num_preemptions", "num_steps"),
        *("num_accepted_drafts", "num_rejected_drafts"),
    }
)


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
    told["score"] = told.pop("total")
    return told


def _leg(leg: worker_pb2.RequestLeg) -> dict[str, Any]:
    return _with_worker(leg) | {"peer": leg.peer.name}


def _with_worker(message: router_pb2.Candidate | worker_pb2.RequestLeg) -> dict[str, Any]:
    """The worker's name as `worker`, its address and epoch among the other fields."""
    told = message_dict(message)
    worker = told.pop("worker")
    return {"worker": worker.pop("name"), **worker, **told}


def _time(unix_seconds: float) -> str:
    """Local time of day, milliseconds."""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%H:%M:%S.%f")[:-3]


def print_explanation(report: dict[str, Any], console: Console) -> None:
    """For people: the choice of each pair, then what each worker did."""
    for assignment in report["assignments"]:
        _print_assignment(assignment, console)
    legs = sorted(report["legs"], key=lambda leg: leg["leg_id"])
    for leg_id, group in groupby(legs, key=lambda leg: leg["leg_id"]):
        _print_legs(leg_id, sorted(group, key=lambda leg: leg["accepted_at"]), console)
    for name in report["unreachable"]:
        console.print(f"{name} had a part in it and does not answer any more")


def _print_assignment(assignment: dict[str, Any], console: Console) -> None:
    leg_id, outcome = assignment["leg_id"], assignment["outcome"]
    at, waited = _time(assignment["at"]), format_duration(assignment["queue_seconds"])
    told = (
        f"{leg_id}: assigned at {at} after {waited} in line; {assignment['num_prompt_tokens']} "
        f"prompt tokens, {assignment['num_matched_pages']} pages of them expected at prefill"
    )
    if outcome != "ok":
        told = f"{leg_id}: not assigned ({outcome}) at {at}, {waited} after it was asked for"
    console.print(told, soft_wrap=True)
    table = make_table("", "role", "worker", "score", "because", fold="because")
    for each in assignment["candidates"]:
        if each["rejected_by"]:
            score, because = "-", f"left out by filter {each['rejected_by']}"
            if each["rejected_by"] == "paired":
                because += ": no worker of the other role is left that it can work with"
        else:
            score, because = f"{each['score']:.3f}", _because(each["parts"])
        mark = "*" if each["chosen"] else ""
        table.add_row(mark, each["role"], each["worker"], score, because)
    console.print(table)
    console.print()


def _because(parts: list[dict[str, Any]]) -> str:
    return ", ".join(f"{p['scorer']} {p['score']:.3f} (weight {p['weight']:g})" for p in parts)


def _print_legs(leg_id: str, legs: list[dict[str, Any]], console: Console) -> None:
    table = make_table(leg_id, *(leg["worker"] for leg in legs))
    for key, title, text in _LINES:
        values = [
            "-" if key in _DECODE_ONLY and leg["role"] != "decode" else text(leg[key])
            for leg in legs
        ]
        table.add_row(title, *values)
    console.print(table)
    console.print()
