"""How operator commands reach the router's admin service, and what becomes of their errors.

    @admin_command
    async def workers(admin: AdminConnection, output: Output = "table") -> None:
        '''Lists the workers.'''
        reply = await admin.call(admin.stub.GetStatus, GetStatusRequest())

The decorated function has the options of a connection (--router, --token-file, --kubeconfig,
--cluster-token-file, ...) beside its own. Exit status: 0; 1 when the cluster refuses, fails or
does not answer; 2 when the command makes no sense.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import grpc
import typer
from google.protobuf.message import Message

from core.errors import EpserveError, InvalidRequest, Unauthenticated, Unavailable
from core.printable import printable
from core.token_file import read_token
from ctl.admin.port_forward import port_forward
from ctl.admin.printable_message import make_printable
from ctl.base.cluster_access import ClusterAccess, find_token
from ctl.base.options import with_options
from proto import router_pb2_grpc
from rpc.admin_token import bearer_metadata
from rpc.client import channel, to_error
from rpc.cluster_credentials import ClusterCredentials, load

if TYPE_CHECKING:  # only the stubs of the type checker have it
    from proto.router_pb2_grpc import AdminAsyncStub

DEFAULT_ROUTER = "127.0.0.1:8001"
TOKEN_VARIABLE = "EPSERVE_ADMIN_TOKEN"
# Longer than the router asks workers.
ANSWER_SECONDS = 5.0

Reply = TypeVar("Reply", bound=Message)
Command = Callable[..., Awaitable[None]]


class NoAnswer(Unavailable):
    """Nothing, or no router, listens there."""


def _option(help: str, **settings: Any) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Option(help=help, show_default=False, rich_help_panel="Connection", **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(ClusterAccess):
    """Where the router is: an address, or a pod to be found through the Kubernetes API; and what
    lets us in. Each field is an option of every admin command."""

    router: Annotated[
        str,
        _option(f"host:port of the router; default: {DEFAULT_ROUTER}", envvar="EPSERVE_ROUTER"),
    ] = ""
    token_file: Annotated[
        Path | None,
        _option(f"File with the admin token; default: the variable {TOKEN_VARIABLE}"),
    ] = None
    kubeconfig: Annotated[
        Path | None,
        _option("Reach a router pod through the Kubernetes API, with this file", exists=True),
    ] = None
    context: Annotated[str, _option("The same, with this context of the kubeconfig file")] = ""
    namespace: Annotated[str, _option("The same, in this namespace")] = ""
    release: Annotated[str, _option("The same, of this Helm release where there are several")] = ""

    @property
    def in_kubernetes(self) -> bool:
        return bool(self.kubeconfig or self.context or self.namespace or self.release)

    def credentials(self, address: str) -> ClusterCredentials:
        """For the router at `address`. Raises ValueError for files that make no sense."""
        if self.cluster_token_file is not None or self.in_kubernetes:
            return load(self)
        return load(replace(self, cluster_token_file=find_token(address)))

    def token(self) -> str:
        """ "" where none is configured. Raises ValueError for a file that holds none."""
        if self.token_file is not None:
            return read_token(self.token_file)
        return os.environ.get(TOKEN_VARIABLE, "").strip()


class AdminConnection:
    """`stub` is the router's admin service; go through `call` or `stream` to have the token
    sent along, errors told apart, and all texts of replies safe to show. `router` names it in
    messages."""

    def __init__(self, peer: grpc.aio.Channel, router: str, token: str) -> None:
        self.router = router
        self.stub: AdminAsyncStub = router_pb2_grpc.AdminStub(peer)
        self._metadata = bearer_metadata(token)

    async def call(
        self,
        method: Callable[..., Awaitable[Reply]],
        request: object,
        timeout_seconds: float = ANSWER_SECONDS,
    ) -> Reply:
        """One answer. Raises EpserveError; NoAnswer when it was not the router's own."""
        try:
            reply = await method(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._meant(error) from error
        make_printable(reply)
        return reply

    async def stream(
        self, method: Callable[..., AsyncIterable[Reply]], request: object
    ) -> AsyncGenerator[Reply]:
        """All answers of a streaming method, for as long as it takes. Raises as `call` does."""
        try:
            async for reply in method(request, metadata=self._metadata):
                make_printable(reply)
                yield reply
        except grpc.aio.AioRpcError as error:
            raise self._meant(error) from error

    def _meant(self, error: grpc.aio.AioRpcError) -> EpserveError:
        meant = to_error(error)
        meant.message = printable(meant.message)
        pairs = cast("list[tuple[str, str | bytes]]", error.trailing_metadata() or [])
        if "error-code" in dict(pairs):
            return meant
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return NoAnswer(f"the process at {self.router} is no router that knows this command")
        return NoAnswer(f"no answer from the router at {self.router}: {meant.message}")


@asynccontextmanager
async def connect(target: Target) -> AsyncGenerator[AdminConnection]:
    """Raises ValueError for a target that makes no sense, EpserveError when there is no way to
    it."""
    token = target.token()
    if not target.in_kubernetes:
        address = target.router or DEFAULT_ROUTER
        async with channel(address, target.credentials(address)) as peer:
            yield AdminConnection(peer, address, token)
        return
    if target.router:
        raise ValueError(
            "both a router (--router or EPSERVE_ROUTER) and a way through Kubernetes are given"
        )
    forward = port_forward(
        kubeconfig=target.kubeconfig,
        context=target.context,
        namespace=target.namespace,
        release=target.release,
    )
    with forward as address:
        async with channel(address, target.credentials(address)) as peer:
            yield AdminConnection(peer, "a router pod", token)


def admin_command(command: Command) -> Callable[..., None]:
    """Makes a typer command of a coroutine function whose first parameter is the connection.
    What goes wrong becomes words on stderr and an exit status."""

    async def connected(target: Target, values: dict[str, Any]) -> None:
        async with connect(target) as admin:
            await command(admin, **values)

    @wraps(command)
    def run(target: Target, **values: Any) -> None:  # noqa: ANN401 - the command's options
        try:
            asyncio.run(connected(target, values))
        except EpserveError as error:
            hint = ""
            if isinstance(error, Unauthenticated):
                hint = f": give --token-file, or set {TOKEN_VARIABLE}"
            typer.echo(f"error: {error.message}{hint}", err=True)
            raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return with_options(Target)(run)
