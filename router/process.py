"""The router process: server, discovery, one watcher a worker, metrics, stop."""

import asyncio
from collections.abc import Collection
from functools import partial

from core.address import parse_address
from core.clock import SystemClock
from core.log import get_logger
from core.metrics import ProcessRegistry, serve
from core.process import Identity
from core.signals import stop_event
from proto import router_pb2
from proto.router_pb2_grpc import add_AdminServicer_to_server, add_RouterServicer_to_server
from router.admin.processes import Processes
from router.admin.service import AdminService
from router.cluster import Cluster
from router.discovery.choice import make_discovery
from router.discovery.members import Member, Roster
from router.gateways import GatewayTable
from router.metrics import RouterMetrics
from router.service import RouterService
from router.settings import RouterSettings
from router.watch import Watchers, watch_worker
from rpc.admin_token import AdminToken
from rpc.identity import identity_message
from rpc.server import RpcServer

log = get_logger("router")


class RouterProcess:
    """Create it inside the running loop; `address` is known at once. Raises OSError when the
    port is taken, DiscoveryError when there is no way to discover workers as the settings say."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._registry = ProcessRegistry()
        self._metrics = metrics = RouterMetrics(self._registry)
        self._discovery = make_discovery(settings, metrics.num_discovery_failures.inc)
        self._server = RpcServer(settings.listen)
        self.address = self._server.address
        identity = Identity(
            role="router",
            name=settings.name or "router",
            address=settings.address_at(self._server.bound_port),
        )
        self.cluster = Cluster(settings, self._clock, metrics)
        gateways = GatewayTable()
        processes = Processes(identity_message(identity), self.cluster.table, gateways, self._clock)
        self._server.add(
            add_RouterServicer_to_server,
            RouterService(self.cluster, gateways, self._clock, metrics),
            router_pb2,
            "Router",
            multiplexed=("Assign",),
        )
        self._server.add(
            add_AdminServicer_to_server,
            AdminService(self.cluster, processes, settings, AdminToken(settings.admin_token_file)),
            router_pb2,
            "Admin",
            multiplexed=(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then ends waiting calls and itself, in bounded time."""
        settings = self._settings
        metrics_server = serve(
            settings.metrics_port, self._registry, parse_address(settings.listen).host
        )
        try:
            async with asyncio.TaskGroup() as group:
                watch = partial(watch_worker, report=self.cluster.apply, settings=settings)
                watchers = Watchers(self.cluster, watch, group)
                await self._server.start()
                log.info("router serves", address=self.address, metrics_port=metrics_server.port)
                following = group.create_task(self._follow(watchers), name="discovery")
                await stop.wait()
                log.info("router stops")
                self.cluster.assigner.close()
                following.cancel()
                await self._server.stop(settings.stop_seconds)
                watchers.close()
        finally:
            metrics_server.close()

    async def _follow(self, watchers: Watchers) -> None:
        roster = Roster()

        def report(source: str, members: Collection[Member]) -> None:
            for event in roster.update(source, members):
                watchers.apply(event)
            self._metrics.show_members(roster.members)

        await self._discovery.follow(report)


async def run_router(settings: RouterSettings) -> None:
    """Runs the router until SIGTERM or SIGINT."""
    await RouterProcess(settings).run(stop_event())
