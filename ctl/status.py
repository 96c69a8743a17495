"""`ctl status`: every process of a running cluster, as its router knows them."""

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ctl.connection import AdminConnection, Output, admin_command, print_json
from ctl.tables import format_age, make_table, role_word
from ctl.terminal import make_console
from proto import router_pb2, worker_pb2


@admin_command
async def status(
    admin: AdminConnection,
    output: Output = "table",
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help="As --output json")] = False,
) -> None:
    """Shows every process, its epoch and age, and what the ranks of the workers are doing."""
    report = describe(await get_status(admin), time.time())
    if as_json or output == "json":
        print_json(report)
    else:
        print_report(report, make_console())


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
        "processes": [_process(identity, now) for identity in identities.values()],
        "workers": [describe_worker(worker) for worker in reply.workers],
        "rejected": [
            {"name": each.identity.name, "epoch": each.identity.epoch, "reason": each.reason}
            for each in reply.rejected
        ],
        "num_waiting": reply.num_waiting,
    }


def _process(identity: worker_pb2.ProcessIdentity, now: float) -> dict[str, Any]:
    return {
        "role": role_word(identity.role),
        "name": identity.name,
        "address": identity.address,
        "pid": identity.pid,
        "epoch": identity.epoch,
        "age_seconds": round(max(0.0, now - identity.started_at), 1),
    }


def describe_worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    """One worker as plain data."""
    ranks = [
        {
            "rank": rank.rank,
            "device": rank.device,
            "pid": rank.pid,
            "num_running": rank.num_running,
            "num_waiting": rank.num_waiting,
            "max_running": rank.max_running,
            "pages_free": rank.pages_free,
            "pages_total": rank.pages_total,
            "pages_cached": rank.pages_cached,
            "pages_quarantined": rank.pages_quarantined,
            "num_steps": rank.num_steps,
        }
        for rank in worker.ranks
    ]
    return {
        "name": worker.identity.name,
        "role": role_word(worker.identity.role),
        "address": worker.identity.address,
        "epoch": worker.identity.epoch,
        "model": worker.model,
        "kv_fingerprint": worker.kv_fingerprint,
        "page_tokens": worker.page_tokens,
        "max_model_len": worker.max_model_len,
        "state": _state(worker),
        "num_accepted_total": worker.num_accepted_total,
        "num_open": worker.num_open,
        "expert_group": worker.expert_group.name,
        "ranks": ranks,
    }


def _state(worker: worker_pb2.WorkerStatus) -> str:
    if worker.draining:
        return "drained" if worker.drained else "draining"
    return "ready" if worker.ready else "starting"


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables for people."""
    console.print(_process_table(report))
    if report["workers"]:
        console.print()
        console.print(_rank_table(report))
    for rejected in report["rejected"]:
        console.print(f"rejected: {rejected['name']}: {rejected['reason']}", markup=False)
    if report["num_waiting"]:
        console.print(f"requests waiting for a worker: {report['num_waiting']}")


def _process_table(report: dict[str, Any]) -> Table:
    table = make_table("role", "name", "address", "pid", "epoch", "age")
    for each in report["processes"]:
        table.add_row(
            each["role"],
            each["name"],
            each["address"],
            str(each["pid"]),
            each["epoch"],
            format_age(each["age_seconds"]),
        )
    return table


def _rank_table(report: dict[str, Any]) -> Table:
    table = make_table(
        "worker", "state", "rank", "device", "pid", "running", "waiting", "free pages", "pages"
    )
    for worker in report["workers"]:
        if not worker["ranks"]:
            table.add_row(worker["name"], worker["state"])
        for rank in worker["ranks"]:
            figures = ("rank", "device", "pid", "num_running", "num_waiting", "pages_free")
            table.add_row(
                worker["name"],
                worker["state"],
                *(str(rank[figure]) for figure in figures),
                str(rank["pages_total"]),
            )
    return table
