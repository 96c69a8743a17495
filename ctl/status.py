"""`ctl status`: every process of a running cluster, as its router knows them."""

import asyncio
import json
import time
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from core.errors import EpserveError
from ctl.terminal import make_console
from proto import router_pb2, router_pb2_grpc, worker_pb2
from rpc.client import channel, to_error

_ANSWER_SECONDS = 5.0


def status(
    router: Annotated[str, typer.Option(help="host:port of the router")] = "127.0.0.1:8001",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables")] = False,
) -> None:
    """Shows every process, its epoch and age, and what the workers are doing."""
    try:
        reply = asyncio.run(get_status(router))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--router") from error
    except EpserveError as error:
        make_console(stderr=True).print(
            f"error: no answer from the router at {router}: {error.message}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    report = describe(reply, time.time())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report, make_console())


async def get_status(router: str) -> router_pb2.GetStatusResponse:
    """Raises ValueError for an address that is none, EpserveError without an answer."""
    async with channel(router) as peer:
        try:
            return await router_pb2_grpc.AdminStub(peer).GetStatus(
                router_pb2.GetStatusRequest(), timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error


def describe(reply: router_pb2.GetStatusResponse, now: float) -> dict[str, Any]:
    """The reply as plain data; `now` is in unix seconds.

    `processes` are all of them: the router, gateways and workers, rejected ones included.
    """
    identities = {each.epoch: each for each in reply.processes}
    identities |= {each.identity.epoch: each.identity for each in reply.workers}
    identities |= {each.identity.epoch: each.identity for each in reply.rejected}
    return {
        "processes": [_process(identity, now) for identity in identities.values()],
        "workers": [_worker(worker) for worker in reply.workers],
        "rejected": [
            {"name": each.identity.name, "epoch": each.identity.epoch, "reason": each.reason}
            for each in reply.rejected
        ],
        "num_waiting": reply.num_waiting,
    }


def _process(identity: worker_pb2.ProcessIdentity, now: float) -> dict[str, Any]:
    return {
        "role": worker_pb2.Role.Name(identity.role).removeprefix("ROLE_").lower(),
        "name": identity.name,
        "address": identity.address,
        "pid": identity.pid,
        "epoch": identity.epoch,
        "age_seconds": round(max(0.0, now - identity.started_at), 1),
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
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
        "role": worker_pb2.Role.Name(worker.identity.role).removeprefix("ROLE_").lower(),
        "epoch": worker.identity.epoch,
        "model": worker.model,
        "kv_fingerprint": worker.kv_fingerprint,
        "page_tokens": worker.page_tokens,
        "max_model_len": worker.max_model_len,
        "state": _state(worker),
        "num_accepted_total": worker.num_accepted_total,
        "ranks": ranks,
    }


def _state(worker: worker_pb2.WorkerStatus) -> str:
    if worker.draining:
        return "draining"
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
    table = _table("role", "name", "address", "pid", "epoch", "age")
    for each in report["processes"]:
        table.add_row(
            each["role"], each["name"], each["address"], str(each["pid"]), each["epoch"],
            format_age(each["age_seconds"]),
        )
    return table


def _rank_table(report: dict[str, Any]) -> Table:
    table = _table(
        "worker", "state", "rank", "device", "pid", "running", "waiting", "free pages", "pages"
    )
    for worker in report["workers"]:
        if not worker["ranks"]:
            table.add_row(worker["name"], worker["state"])
        for rank in worker["ranks"]:
            figures = ("rank", "device", "pid", "num_running", "num_waiting", "pages_free")
            table.add_row(
                worker["name"], worker["state"], *(str(rank[figure]) for figure in figures),
                str(rank["pages_total"]),
            )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def format_age(seconds: float) -> str:
    """Seconds in the two largest units: 42s, 3m 5s, 2h 0m, 1d 4h."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {seconds}s" if minutes else f"{seconds}s"
