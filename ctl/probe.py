"""`ctl probe`: whether a process is healthy, for the health checks of containers."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated

import typer

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.names import complete_worker
from ctl.admin.status import describe_worker, get_status
from ctl.base.cluster_access import ClusterAccess
from ctl.base.options import with_options
from ctl.local.readiness import NotHealthy, check_grpc, check_http
from rpc.cluster_credentials import load

app = typer.Typer(
    no_args_is_help=True,
    help="Asks a process for its health: exit status 0 if it serves, 1 if it does not.",
)

_Address = Annotated[str, typer.Argument(help="host:port of the process", show_default=False)]
_Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer")]


@app.command("grpc", epilog="Example: ctl probe grpc 127.0.0.1:8001")
@with_options(ClusterAccess)
def probe_grpc(
    access: ClusterAccess,
    address: _Address,
    service: Annotated[
        str,
        typer.Option(
            help="Whose health; default: whether it takes requests; liveness: whether it lives",
            show_default=False,
        ),
    ] = "",
    timeout: _Timeout = 2.0,
) -> None:
    """Asks a router or a worker (standard gRPC health)."""
    try:
        credentials = load(access)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _conclude(check_grpc(address, service, timeout, credentials))


@app.command("http", epilog="Example: ctl probe http 127.0.0.1:8000 --path /ready")
def probe_http(
    address: _Address,
    path: Annotated[str, typer.Option(help="What to GET; 200 is healthy")] = "/health",
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS, with any certificate")] = False,
    alive: Annotated[
        bool, typer.Option("--alive", help="401 is healthy as well: it lives, and guards its paths")
    ] = False,
    timeout: _Timeout = 2.0,
) -> None:
    """Asks a gateway."""
    _conclude(check_http(address, path, timeout, tls=tls, alive=alive))


@app.command("pair", epilog="Example: ctl probe pair decode-0 --router router:8001")
@admin_command
async def probe_pair(
    admin: AdminConnection,
    worker: Annotated[
        str,
        typer.Argument(
            help="Name of the worker", autocompletion=complete_worker, show_default=False
        ),
    ],
) -> None:
    """Asks a router whether a worker takes requests together with one of the other role."""
    reply = await get_status(admin)
    namesakes = [each for each in reply.workers if each.identity.name == worker]
    if any(each.identity.epoch in reply.paired_epochs for each in namesakes):
        typer.echo("healthy")
        return
    problem = "the router knows no such worker"
    for each in namesakes:
        state = describe_worker(each)["state"]
        problem = "no worker of the other role is ready" if state == "ready" else f"it is {state}"
    reasons = [each.reason for each in reply.rejected if each.identity.name == worker]
    typer.echo(f"not healthy: {' '.join(reasons) or problem}", err=True)
    raise typer.Exit(1)


def _conclude(asking: Coroutine[None, None, None]) -> None:
    try:
        asyncio.run(asking)
    except NotHealthy as error:
        typer.echo(f"not healthy: {error}", err=True)
        raise typer.Exit(1) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="address") from error
    typer.echo("healthy")
