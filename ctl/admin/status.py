"""`ctl status`: every process of a running cluster, as its router knows them."""

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.message_dict import message_dict
from ctl.admin.stuck import Stuck, find_stuck
from ctl.base.output import Output, show
from ctl.base.tables import format_age, make_table
from proto import router_pb2, worker_pb2


@admin_command
async def status(
    admin: AdminConnection,
    output: Output = "table",
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help="As --output json")] = False,
) -> None:
    """Shows every process, its epoch and age, what the ranks of the workers are doing, and what is
    stuck since when."""
    report = describe(await get_status(admin), time.time())
    show(report, "json" if as_json else output, print_report)


async def get_status(admin: AdminConnection) -> router_pb2.GetStatusResponse:
    """Raises EpserveError without an answer."""
    return await admin.call(admin.stub.GetStatus, router_pb2.GetStatusRequest())


def describe(reply: router_pb2.GetStatusResponse, now: float) -> dict[str, Any]:
    """The reply as plain data; `now` is in unix seconds.

    `processes` are all of them: the router, gateways and workers, rejected ones included.
    """
    identities = {each.epoch: each for each in reply.processes}
    identities |= {each.identity.epoch: each.identity for each in reply.workers}
    identities |= {each.identity.epoch: each.identity for each in reply.rejected}
    return {
        "processes": [
            message_dict(each) | {"age_seconds": age_seconds(each, now)}
            for each in identities.values()
        ],
        "workers": [describe_worker(worker) for worker in reply.workers],
        "rejected": [message_dict(each) for each in reply.rejected],
        "num_waiting": reply.num_waiting,
        "longest_wait_seconds": round(reply.longest_wait_seconds, 1),
        "stuck": [asdict(each) for each in find_stuck(reply)],
    }


def age_seconds(identity: worker_pb2.ProcessIdentity, now: float) -> float:
    return round(max(0.0, now - identity.started_at), 1)


def describe_worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    """One worker as plain data."""
    state = "ready" if worker.ready else "starting"
    if worker.draining:
        state = "drained" if worker.drained else "draining"
    return message_dict(worker) | {"state": state, "expert_group": worker.expert_group.name}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables for people."""
    keys = ("role", "name", "address", "pid", "epoch", "version")
    table = make_table(*keys, "age")
    for each in report["processes"]:
        cells = [str(each[key]) for key in keys]
        table.add_row(*cells, format_age(each["age_seconds"]))
    console.print(table)
    if report["workers"]:
        console.print()
        _print_ranks(report["workers"], console)
    for each in report["rejected"]:
        console.print(f"rejected: {each['name']}: {each['reason']}")
    for each in report["stuck"]:
        console.print(f"stuck: {Stuck(**each).sentence()}", soft_wrap=True)
    if report["num_waiting"]:
        longest = format_age(report["longest_wait_seconds"])
        console.print(f"requests waiting for a worker: {report['num_waiting']}, up to {longest}")


def _print_ranks(workers: list[dict[str, Any]], console: Console) -> None:
    """A line a rank."""
    table = make_table(
        "worker", "state", "rank", "device", "pid", "running", "waiting", "free pages", "pages"
    )
    keys = ("rank", "device", "pid", "num_running", "num_waiting", "pages_free", "pages_total")
    for worker in workers:
        for rank in worker["ranks"]:
            table.add_row(worker["name"], worker["state"], *(str(rank[key]) for key in keys))
        if not worker["ranks"]:
            table.add_row(worker["name"], worker["state"])
    console.print(table)
