"""Names of processes for shells to complete."""

import asyncio
from dataclasses import fields
from typing import Annotated

import typer

from core.errors import EpserveError
from ctl.admin.connection import Target, connect
from proto.router_pb2 import GetStatusRequest, GetStatusResponse

# Of the operator, who has pressed the tab key and waits.
_ANSWER_SECONDS = 1.5


def complete_worker(context: typer.Context, incomplete: str) -> list[str]:
    """Workers of the cluster that the options so far name; none where it does not answer."""
    names = [worker.identity.name for worker in _status(context).workers]
    return [name for name in names if name.startswith(incomplete)]


def complete_process(context: typer.Context, incomplete: str) -> list[str]:
    """The same of all processes."""
    reply = _status(context)
    identities = [*(worker.identity for worker in reply.workers), *reply.processes]
    return [each.name for each in identities if each.name.startswith(incomplete)]


# One process, or all of them.
ProcessName = Annotated[
    str,
    typer.Argument(
        help="Name or address of one process; default: all of them",
        autocompletion=complete_process,
        show_default=False,
    ),
]


def _status(context: typer.Context) -> GetStatusResponse:
    names = {field.name for field in fields(Target)}
    target = Target(**{name: context.params[name] for name in names & context.params.keys()})
    try:
        return asyncio.run(_ask(target))
    except (EpserveError, ValueError):
        return GetStatusResponse()


async def _ask(target: Target) -> GetStatusResponse:
    async with connect(target) as admin:
        return await admin.call(admin.stub.GetStatus, GetStatusRequest(), _ANSWER_SECONDS)
