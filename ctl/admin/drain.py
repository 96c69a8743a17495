"""`ctl drain` and `ctl undrain`: a worker that takes no requests, and again does."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ctl.admin.connection import AdminConnection, NoAnswer, admin_command
from ctl.admin.names import complete_worker
from ctl.admin.status import get_status
from ctl.base.output import Output, print_json
from proto.router_pb2 import DrainWorkerRequest
from proto.worker_pb2 import ProcessIdentity, WorkerStatus

_ASK_AGAIN_SECONDS = 0.25
# A router that was restarted needs a moment to hear of its workers.
_GONE_SECONDS = 5.0
# One that does not answer for so long may have ended for good, with the rest of the cluster.
_SILENT_SECONDS = 60.0

_Worker = Annotated[
    str,
    typer.Argument(
        help="Name of the worker; its address where several have the name",
        autocompletion=complete_worker,
        show_default=False,
    ),
]


@admin_command
async def drain(
    admin: AdminConnection,
    worker: _Worker,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when nothing needs it any more")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds that open requests have before others carry them on; default: the "
            "worker's own --stop-grace-seconds",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="With --wait: seconds at most")] = 600.0,
    output: Output = "table",
) -> None:
    """Has a worker take no new requests, hand over what is open, and let go of its KV pages.

    The worker keeps running: stop it when it is drained, or take it back with `ctl undrain`.
    The other nodes of its EP group do the same with it, in both ways.
    With --wait, exit status 1 says that it was not drained in time, or that no router answers.
    """
    began = time.monotonic()
    request = DrainWorkerRequest(worker=worker)
    if grace is not None:
        request.grace_seconds = grace
    reply = await admin.call(admin.stub.DrainWorker, request)
    nodes = [reply.worker, *reply.others]
    states = ["draining"] * len(nodes)
    if wait:
        deadline = began + timeout
        states = await asyncio.gather(*(_until_drained(admin, node, deadline) for node in nodes))
    seconds = time.monotonic() - began
    _tell(nodes, states, seconds if wait else None, output)
    if wait and "draining" in states:
        typer.echo(f"error: not drained within {timeout:g} s", err=True)
        raise typer.Exit(1)


@admin_command
async def undrain(admin: AdminConnection, worker: _Worker, output: Output = "table") -> None:
    """Has a draining or drained worker take requests again."""
    request = DrainWorkerRequest(worker=worker, undo=True)
    reply = await admin.call(admin.stub.DrainWorker, request)
    nodes = [reply.worker, *reply.others]
    _tell(nodes, ["ready"] * len(nodes), None, output)


async def _until_drained(admin: AdminConnection, identity: ProcessIdentity, deadline: float) -> str:
    """drained, gone (ended meanwhile), or draining when the time is over. Raises NoAnswer when the
    router has none for long."""
    last_open = -1
    last_seen = last_answer = time.monotonic()
    while True:
        try:
            status = await _find(admin, identity)
            last_answer = time.monotonic()
            if status is not None:
                last_seen = last_answer
                if status.identity.epoch != identity.epoch:
                    return "gone"  # another one listens there by now
                if status.drained:
                    return "drained"
                if status.num_open != last_open:
                    last_open = status.num_open
                    typer.echo(f"{identity.name}: {last_open} requests open", err=True)
            elif last_answer - last_seen >= _GONE_SECONDS:
                return "gone"
        except NoAnswer as error:
            last_seen = time.monotonic()  # without an answer it is not known to be gone
            if last_seen - last_answer >= _SILENT_SECONDS:
                raise NoAnswer(f"{error.message}; {identity.name} may not be drained") from error
        if time.monotonic() >= deadline:
            return "draining"
        await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def _find(admin: AdminConnection, identity: ProcessIdentity) -> WorkerStatus | None:
    """Who is at the worker's address."""
    reply = await get_status(admin)
    found = (one for one in reply.workers if one.identity.address == identity.address)
    return next(found, None)


def _tell(
    nodes: Sequence[ProcessIdentity], states: Sequence[str], seconds: float | None, output: str
) -> None:
    """The first of `nodes` is the worker that was named."""
    if output == "json":
        report, *others = map(_report, nodes, states)
        if others:
            report["others"] = others
        if seconds is not None:
            report["seconds"] = round(seconds, 3)
        print_json(report)
        return
    after = "" if seconds is None else f" after {seconds:.1f} s"
    for node, state in zip(nodes, states, strict=True):
        typer.echo(f"{node.name} ({node.address}) is {state}{after}")


def _report(node: ProcessIdentity, state: str) -> dict[str, Any]:
    return {"name": node.name, "address": node.address, "epoch": node.epoch, "state": state}
