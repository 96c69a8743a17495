"""The gateway process: everything wired up, served by uvicorn, stopped within bounds."""

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from core import tracing
from core.address import Address, parse_address
from core.clock import SystemClock
from core.huge_pages import use_huge_pages
from core.log import get_logger
from core.metrics import serve as serve_metrics
from core.process import Identity
from core.signals import stop_event
from gateway.app import create_app
from gateway.base.metrics import GatewayMetrics
from gateway.base.settings import GatewaySettings
from gateway.beats import beat
from gateway.cluster.channels import ChannelPool
from gateway.cluster.client import Cluster
from gateway.cluster.failover_policy import FailoverBounds
from gateway.cluster.routers import Routers
from gateway.frontend import Frontend
from gateway.generation_response import Serving
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.http.certificate import Certificate
from gateway.http.http_protocol import HttpProtocol
from gateway.http.listener import listen_on
from gateway.limits.admission import Admission
from gateway.limits.api_keys import ApiKeys
from gateway.limits.bucket_memory import BucketMemory
from gateway.limits.rate_limit import Limits, RateLimiter
from gateway.prompt.served_model import ServedModel
from gateway.responses_api.response_store import ResponseStore
from gateway.router_heartbeat import RouterHeartbeat
from rpc import cluster_credentials

log = get_logger("gateway.server")

BACKLOG = 2048
GC_THRESHOLDS = (50_000, 20, 50)
# How long a thread that is done (with a long prompt, or gRPC's own) waits for a busy event loop.
SWITCH_SECONDS = 0.0005
BUCKET_FILE = "rate_limits"
RESPONSES_FILE = "responses"
LOOK_SECONDS = 0.5
# From the first moment that requests are taken.
WARM_AFTER_SECONDS = 1.0
# After the bound on readers of streams, the kernel closes the connection of a client that still
# reads nothing and drops what waits for it, also after the end of a response.
UNREAD_SECONDS = 60.0
# For responses that ignore that they were told to end.
FORCED_STOP_SECONDS = 1


class _HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: GatewaySettings, *, patient: bool = False) -> None:
    """Serves until SIGTERM or SIGINT, `patient` as in `stop_event`. Raises CheckpointError for a
    bad model folder, ValueError where traces cannot be sent or the cluster's credentials make no
    sense, and OSError when the address is taken."""
    cluster_credentials.use(settings)
    model = ServedModel.load(settings)
    tracing.configure("gateway", settings.name, settings.otlp_endpoint, settings.trace_sample_ratio)
    # What is there by now stays: collections that look at it, or at the tasks of a thousand
    # streams every few hundred tokens, cost a fifth of the time.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    use_huge_pages()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with (
            listen_on(settings.listen, shared=settings.shared_folder is not None) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_serve_until_signal(settings, model, listener, patient=patient))
    finally:
        tracing.shutdown()


async def _serve_until_signal(
    settings: GatewaySettings, model: ServedModel, listener: socket.socket, *, patient: bool
) -> None:
    await serve(settings, model, listener, stop_event(patient=patient))


async def serve(
    settings: GatewaySettings, model: ServedModel, listener: socket.socket, stop: asyncio.Event
) -> None:
    """Serves on a bound socket until `stop` is set, then ends within bounds."""
    _bound_unread(listener, settings.reader_stall_seconds + UNREAD_SECONDS)
    address = Address(parse_address(settings.listen).host, listener.getsockname()[1])
    identity = Identity(
        role="gateway",
        name=settings.name or "gateway",
        address=settings.address_at(address.port),
    )
    async with contextlib.AsyncExitStack() as stack:
        routers = Routers(settings.router)
        stack.push_async_callback(routers.close)
        channels = ChannelPool()
        stack.push_async_callback(channels.close)
        clock = SystemClock()
        metrics = GatewayMetrics()
        metrics.watch_tasks(asyncio.get_running_loop())
        metrics_server = serve_metrics(settings.metrics_port, metrics.registry, address.host)
        stack.callback(metrics_server.close)
        heartbeat = RouterHeartbeat(
            routers, identity, clock, metrics,
            model=model.name, config_json=settings.public_json(),
        )  # fmt: skip
        admission = Admission(
            max_inflight=settings.max_inflight, max_queued=settings.max_queued,
            max_queue_seconds=settings.max_queue_seconds, metrics=metrics, clock=clock,
        )  # fmt: skip
        buckets = stack.enter_context(contextlib.closing(_bucket_memory(settings)))
        keys = make_keys(settings)
        responses = stack.enter_context(contextlib.closing(_response_store(settings)))
        grammars = GrammarCompiler(settings.model, model.eos_token_ids)
        stack.push_async_callback(grammars.close)
        frontend = Frontend(
            settings=settings,
            model=model,
            grammars=grammars,
            responses=responses,
            cluster=_cluster(settings, model, routers, channels, metrics),
            heartbeat=heartbeat,
            serving=Serving(
                admission, metrics, clock, RateLimiter(buckets, clock),
                settings.ping_seconds, settings.reader_stall_seconds,
            ),
        )  # fmt: skip
        log.info("listening", address=str(address), model=model.name, epoch=identity.epoch)
        await _serve_frontend(frontend, keys, listener, stop)
    log.info("stopped")


def _bucket_memory(settings: GatewaySettings) -> BucketMemory:
    return BucketMemory(settings.shared_folder and settings.shared_folder / BUCKET_FILE)


def _response_store(settings: GatewaySettings) -> ResponseStore:
    folder = settings.shared_folder
    max_bytes = settings.stored_responses_mib * 2**20
    return ResponseStore(folder and folder / RESPONSES_FILE, max_bytes)


def _bound_unread(listener: socket.socket, seconds: float) -> None:
    """Connections take it over from the listener. Without it the kernel asks a client for ever
    whether it would read on."""
    milliseconds = min(round(1000 * seconds), 2**31 - 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _cluster(
    settings: GatewaySettings,
    model: ServedModel,
    routers: Routers,
    channels: ChannelPool,
    metrics: GatewayMetrics,
) -> Cluster:
    return Cluster(
        routers=routers,
        channels=channels,
        metrics=metrics,
        clock=SystemClock(),
        model=model.name,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        bounds=FailoverBounds(
            max_attempts=settings.max_attempts,
            failover_seconds=settings.failover_seconds,
            replacement_seconds=settings.replacement_seconds,
            router_seconds=settings.router_seconds,
        ),
    )


def make_keys(settings: GatewaySettings) -> ApiKeys:
    """Raises ValueError for keys that make no sense."""
    return ApiKeys(
        file=settings.api_keys_file,
        keys=[key for key in settings.api_keys.split(",") if key.strip()],
        limits=Limits(settings.requests_per_minute, settings.tokens_per_minute),
        max_priority=settings.max_priority,
    )


def make_certificate(settings: GatewaySettings) -> Certificate | None:
    """None without TLS. Raises ValueError for files that make no sense."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key)


async def _serve_frontend(
    frontend: Frontend, keys: ApiKeys, listener: socket.socket, stop: asyncio.Event
) -> None:
    settings = frontend.settings
    certificate = make_certificate(settings)
    config = uvicorn.Config(
        create_app(frontend, keys),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=FORCED_STOP_SECONDS,
    )
    config.load()
    config.ssl = None if certificate is None else certificate.context
    server = _HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(frontend.heartbeat.run())
    stopping = asyncio.create_task(stop.wait())
    tasks = {serving, announcing, stopping}
    beside = [asyncio.create_task(keys.watch()), asyncio.create_task(_warm(frontend))]
    if settings.shared_folder is not None:
        beside.append(asyncio.create_task(beat(settings.shared_folder)))
    if certificate is not None:
        beside.append(asyncio.create_task(certificate.watch()))
    try:
        # The first two never end by themselves; if one does, its error is ours.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            log.info("stopping", num_inflight=frontend.serving.admission.num_inflight)
        await frontend.serving.admission.drain(settings.grace_seconds)
        server.should_exit = True
        await serving
        if announcing.done():
            announcing.result()
    finally:
        for task in (*tasks, *beside):
            task.cancel()
        await asyncio.gather(*tasks, *beside, return_exceptions=True)


async def _warm(frontend: Frontend) -> None:
    """What the first requests would wait for, once it delays nothing else."""
    while not frontend.heartbeat.is_ready:
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(WARM_AFTER_SECONDS)
    await frontend.grammars.warm()
