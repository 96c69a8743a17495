"""The gateway process: everything wired up, served by uvicorn, stopped within bounds."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from core.address import Address, parse_address
from core.clock import SystemClock
from core.log import get_logger
from core.metrics import serve as serve_metrics
from core.process import Identity
from core.signals import stop_event
from gateway.admission import Admission
from gateway.announcer import Announcer
from gateway.app import create_app
from gateway.channels import ChannelPool
from gateway.client import Cluster
from gateway.frontend import Frontend
from gateway.generation_response import Serving
from gateway.grammar_compiler import GrammarCompiler
from gateway.metrics import GatewayMetrics
from gateway.served_model import ServedModel
from gateway.settings import GatewaySettings
from proto.router_pb2_grpc import RouterStub
from rpc.client import channel

log = get_logger("gateway.server")

BACKLOG = 2048
# For responses that ignore that they were told to end.
FORCED_STOP_SECONDS = 1


class _HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises CheckpointError for a bad model folder and OSError
    when the address is taken."""
    model = ServedModel.load(settings)
    with (
        listen_on(settings.listen) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve_until_signal(settings, model, listener))


async def _serve_until_signal(
    settings: GatewaySettings, model: ServedModel, listener: socket.socket
) -> None:
    await serve(settings, model, listener, stop_event())


async def serve(
    settings: GatewaySettings, model: ServedModel, listener: socket.socket, stop: asyncio.Event
) -> None:
    """Serves on a bound socket until `stop` is set, then ends within bounds."""
    address = Address(parse_address(settings.listen).host, listener.getsockname()[1])
    identity = Identity(role="gateway", name=settings.name or "gateway", address=str(address))
    async with contextlib.AsyncExitStack() as stack:
        router_channel = await stack.enter_async_context(channel(settings.router))
        channels = ChannelPool()
        stack.push_async_callback(channels.close)
        clock = SystemClock()
        metrics = GatewayMetrics()
        metrics_server = serve_metrics(settings.metrics_port, metrics.registry, address.host)
        stack.callback(metrics_server.close)
        router = RouterStub(router_channel)
        announcer = Announcer(router, identity, clock, model=model.name)
        admission = Admission(max_inflight=settings.max_inflight, metrics=metrics)
        grammars = GrammarCompiler(settings.model, model.eos_token_ids)
        stack.push_async_callback(grammars.close)
        frontend = Frontend(
            settings=settings,
            model=model,
            grammars=grammars,
            cluster=Cluster(
                router=router,
                channels=channels,
                metrics=metrics,
                clock=clock,
                model=model.name,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                max_attempts=settings.max_attempts,
                failover_seconds=settings.failover_seconds,
            ),
            announcer=announcer,
            serving=Serving(admission, metrics, clock),
        )
        log.info("listening", address=str(address), model=model.name, epoch=identity.epoch)
        await _serve_frontend(frontend, listener, stop)
    log.info("stopped")


async def _serve_frontend(frontend: Frontend, listener: socket.socket, stop: asyncio.Event) -> None:
    server = _HttpServer(
        uvicorn.Config(
            create_app(frontend),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=FORCED_STOP_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(frontend.announcer.run())
    stopping = asyncio.create_task(stop.wait())
    tasks = {serving, announcing, stopping}
    try:
        # The first two never end by themselves; if one does, its error is ours.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            log.info("stopping", num_inflight=frontend.serving.admission.num_inflight)
        await frontend.serving.admission.drain(frontend.settings.grace_seconds)
        server.should_exit = True
        await serving
        if announcing.done():
            announcing.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def listen_on(listen: str) -> socket.socket:
    """A bound socket. Raises OSError that names the address."""
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
    return listener
