"""The gRPC server every process runs: health, reflection, keepalive, errors, graceful stop.

server = RpcServer("127.0.0.1:0")
server.add(add_RouterServicer_to_server, servicer, router_pb2, "Router")
print(server.bound_port)            # known before start
await server.start()
...
await server.stop(grace_seconds=5)
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.address import Address, parse_address
from proto import multiplex_pb2, multiplex_pb2_grpc
from rpc.cluster_credentials import ClusterCredentials, used
from rpc.interceptor import CallInterceptor
from rpc.multiplex_server import Method, MultiplexService
from rpc.options import SERVER_OPTIONS

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# Its health is SERVING from `start` to `stop`: for probes that restart a process, which must not
# restart one that is loading or draining. All other health says whether it takes requests.
LIVENESS = "liveness"


class RpcServer:
    """Create it inside the running loop; it is bound at once and answers from `start` on.

    `listen` is host:port, port 0 for a free one. Raises OSError when the port is taken.
    `stopping` is set first thing in `stop`.
    Calls beyond `max_concurrent_calls` are refused with RESOURCE_EXHAUSTED, those of who does not
    belong to the cluster as `credentials` say, by default those of this process.
    """

    def __init__(
        self,
        listen: str,
        *,
        max_concurrent_calls: int = 8192,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        credentials = credentials or used()
        self.stopping = asyncio.Event()
        self._stop_task: asyncio.Task[None] | None = None
        self._calls = CallInterceptor()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services: list[str] = [""]
        self._multiplexed: dict[str, Method] = {}
        self._multiplex = MultiplexService(
            self._multiplexed, self._calls, max_calls=max_concurrent_calls
        )
        self._server = grpc.aio.server(
            interceptors=[*credentials.interceptors(), self._calls],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_concurrent_calls,
        )
        host = parse_address(listen).host
        try:
            self.bound_port = credentials.bind(self._server, str(parse_address(listen)))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        self.address = str(Address(host, self.bound_port))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def num_running_calls(self) -> int:
        """Calls in progress, endless streams left out."""
        return self._calls.num_running

    def add(
        self,
        register: Callable[[Any, grpc.aio.Server], None],
        servicer: object,
        module: ModuleType,
        service: str,
        *,
        multiplexed: Collection[str] | None = None,
    ) -> None:
        """Adds one service: `register` is the generated add_..._to_server, `module` the
        `..._pb2` that describes it, `service` its plain name ("Router"). `multiplexed` names the
        methods that `Multiplex` may carry too, without metadata but the request id: None for
        all those that stream responses and end by themselves."""
        register(servicer, self._server)
        methods = _Methods(self._multiplexed, multiplexed)
        register(servicer, cast("grpc.aio.Server", methods))
        self._services.append(module.DESCRIPTOR.services_by_name[service].full_name)

    async def start(self, *, serving: bool = True) -> None:
        """Starts to answer; health says NOT_SERVING until `set_serving` when not `serving`."""
        await self.set_serving(serving)
        await self._health.set(LIVENESS, _SERVING)
        if self._multiplexed:
            register = multiplex_pb2_grpc.add_MultiplexServicer_to_server
            register(self._multiplex, self._server)
            service = multiplex_pb2.DESCRIPTOR.services_by_name["Multiplex"]
            self._services.append(service.full_name)
        names = [*self._services[1:], health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Health of the whole server ("") and of each service; no effect once stopping."""
        for name in self._services:
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Says NOT_SERVING, refuses new calls and lets running ones finish for at most
        `grace_seconds`; endless streams (Watch...) end when they are alone.

        Calling it again only waits for the first call's end.
        """
        if self._stop_task is None:
            # NOTE: two overlapping stops of one grpc.aio server crash the interpreter.
            self._stop_task = asyncio.create_task(self._stop(grace_seconds))
        await asyncio.shield(self._stop_task)

    async def _stop(self, grace_seconds: float) -> None:
        self.stopping.set()
        self._multiplex.refuse()
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(grace_seconds))
        # One turn of the loop, so that the door is closed before calls are counted.
        await asyncio.sleep(0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._calls.idle.wait(), grace_seconds)
        self._calls.end_watches.set()
        await stopping


class _Methods:
    """Stands in for a server when a service is registered: keeps those of its methods that are
    to be multiplexed, by full name. Streams that never end are not for that."""

    def __init__(self, methods: dict[str, Method], wanted: Collection[str] | None) -> None:
        self._methods = methods
        self._wanted = wanted

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods come by name as well."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
    ) -> None:
        for name, handler in handlers.items():
            if self._wanted is None:
                is_wanted = handler.response_streaming and not name.startswith("Watch")
            else:
                is_wanted = name in self._wanted
            if is_wanted and not handler.request_streaming:
                self._methods[f"/{service}/{name}"] = cast("Method", handler)
