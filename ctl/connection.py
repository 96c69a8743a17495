"""How operator commands reach the router's admin service, and what becomes of their errors.

    @admin_command
    async def workers(admin: AdminConnection, output: Output = "table") -> None:
        '''Lists the workers.'''
        reply = await admin.call(admin.stub.GetStatus, GetStatusRequest())

The decorated function has the options of a connection (--router, --token-file, --kubeconfig,
...) beside its own. Exit status: 0; 1 when the cluster refuses, fails or does not answer; 2 when
the command makes no sense.
"""

import asyncio
import importlib
import inspect
import json
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import grpc
import typer

from core.errors import EpserveError, InvalidRequest, Unauthenticated, Unavailable
from core.token_file import read_token
from ctl.terminal import make_console
from proto import router_pb2_grpc
from rpc.admin_token import bearer_metadata
from rpc.client import channel, to_error

if TYPE_CHECKING:  # only the stubs of the type checker have it
    from proto.router_pb2_grpc import AdminAsyncStub

DEFAULT_ROUTER = "127.0.0.1:8001"
TOKEN_VARIABLE = "EPSERVE_ADMIN_TOKEN"
ANSWER_SECONDS = 10.0

Output = Annotated[
    Literal["table", "json"],
    typer.Option("--output", "-o", help="Tables for people, JSON for programs"),
]

_PANEL = "Connection"
_Router = Annotated[
    str,
    typer.Option(
        envvar="EPSERVE_ROUTER",
        help=f"host:port of the router; default: {DEFAULT_ROUTER}",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        help=f"File with the admin token; default: the variable {TOKEN_VARIABLE}",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Reach a router pod through the Kubernetes API, with this file",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_Context = Annotated[
    str,
    typer.Option(
        help="The same, with this context of the kubeconfig file",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_Namespace = Annotated[
    str,
    typer.Option(help="The same, in this namespace", show_default=False, rich_help_panel=_PANEL),
]
_Release = Annotated[
    str,
    typer.Option(
        help="The same, of this Helm release where there are several",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_OPTIONS: dict[str, tuple[object, object]] = {
    "router": (_Router, ""),
    "token_file": (_TokenFile, None),
    "kubeconfig": (_Kubeconfig, None),
    "context": (_Context, ""),
    "namespace": (_Namespace, ""),
    "release": (_Release, ""),
}

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Command = Callable[..., Awaitable[None]]


class NoAnswer(Unavailable):
    """Nobody, or not a router, listens there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the router is: an address, or a pod to be found through the Kubernetes API."""

    router: str = ""
    token_file: Path | None = None
    kubeconfig: Path | None = None
    context: str = ""
    namespace: str = ""
    release: str = ""

    @property
    def in_kubernetes(self) -> bool:
        return bool(self.kubeconfig or self.context or self.namespace or self.release)

    def token(self) -> str:
        """ "" where none is configured. Raises ValueError for a file that holds none."""
        if self.token_file is not None:
            return read_token(self.token_file)
        return os.environ.get(TOKEN_VARIABLE, "").strip()


class AdminConnection:
    """`stub` is the router's admin service; go through `call` or `stream` to have the token
    sent along and errors told apart. `router` names it in messages."""

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
            return await method(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._meant(error) from error

    async def stream(
        self, method: Callable[..., AsyncIterable[Reply]], request: object
    ) -> AsyncGenerator[Reply]:
        """All answers of a streaming method, for as long as it takes. Raises as `call` does."""
        try:
            async for reply in method(request, metadata=self._metadata):
                yield reply
        except grpc.aio.AioRpcError as error:
            raise self._meant(error) from error

    def _meant(self, error: grpc.aio.AioRpcError) -> EpserveError:
        meant = to_error(error)
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
        async with channel(address) as peer:
            yield AdminConnection(peer, address, token)
        return
    if target.router:
        raise ValueError(
            "both a router (--router or EPSERVE_ROUTER) and a way through Kubernetes are given"
        )
    forward = await asyncio.to_thread(_forward, target)
    with forward as address:
        async with channel(address) as peer:
            yield AdminConnection(peer, "a router pod", token)


def _forward(target: Target) -> AbstractContextManager[str]:
    try:
        # Half a second, and 100 MB installed, for those who do not need it.
        forwards = importlib.import_module("ctl.port_forward")
    except ImportError as error:
        raise ValueError(
            f"pip install 'epserve[kubernetes]' for a way through Kubernetes ({error})"
        ) from error
    forward: AbstractContextManager[str] = forwards.PortForward(
        kubeconfig=target.kubeconfig,
        context=target.context,
        namespace=target.namespace,
        release=target.release,
    )
    return forward


def admin_command(command: Command) -> Callable[..., None]:
    """Makes a typer command of a coroutine function whose first parameter is the connection."""
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _OPTIONS.items()
    ]

    def run(**values: Any) -> None:  # noqa: ANN401 - whatever the command's options are
        target = Target(**{name: values.pop(name) for name in _OPTIONS})
        run_admin(target, lambda admin: command(admin, **values))

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + shared
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def run_admin(target: Target, use: Callable[[AdminConnection], Awaitable[None]]) -> None:
    """Connects, runs, and turns what goes wrong into words on stderr and an exit status."""

    async def connected() -> None:
        async with connect(target) as admin:
            await use(admin)

    try:
        asyncio.run(connected())
    except EpserveError as error:
        hint = ""
        if isinstance(error, Unauthenticated):
            hint = f": give --token-file, or set {TOKEN_VARIABLE}"
        console = make_console(stderr=True)
        console.print(f"error: {error.message}{hint}", markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def print_json(data: object) -> None:
    """`--output json`: all there is on stdout."""
    typer.echo(json.dumps(data, indent=2))
