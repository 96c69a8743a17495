"""Telling the routers that this gateway lives, and hearing what the cluster can do and what an
operator wants."""

import asyncio

from core.clock import Clock
from core.errors import EpserveError
from core.log import current_level, get_logger, set_level
from core.process import Identity
from core.version import software_version
from gateway.base.metrics import GatewayMetrics
from gateway.cluster.routers import Routers
from proto.router_pb2 import AnnounceRequest, AnnounceResponse
from rpc.identity import identity_message

log = get_logger("gateway.router_heartbeat")

INTERVAL_SECONDS = 1.0
# While the cluster is not ready yet: a start is noticed sooner.
IMPATIENT_INTERVAL_SECONDS = 0.2
CALL_TIMEOUT_SECONDS = 1.0
# Routers that have not answered for this long are not there.
FRESH_SECONDS = 3.0


class RouterHeartbeat:
    """Calls Router.Announce of every router once a second and keeps the best answer."""

    def __init__(
        self,
        routers: Routers,
        identity: Identity,
        clock: Clock,
        metrics: GatewayMetrics,
        *,
        model: str,
        config_json: str,
    ) -> None:
        self._routers = routers
        self._request = AnnounceRequest(
            identity=identity_message(identity),
            config_json=config_json,
            version=software_version(),
            model=model,
        )
        self._clock = clock
        self._metrics = metrics
        self._answer = AnnounceResponse()
        self._answered_at: float | None = None
        self._silence = "not asked yet"  # why there is no answer
        self._told: str | None = None  # the last problem that was logged

    @property
    def is_ready(self) -> bool:
        """A router answers, and would place a request for our model."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Why the cluster takes no requests for our model; "" while it does."""
        if not self._is_fresh():
            return "no router answers"
        if self._answer.ready:
            return ""
        return self._answer.problem or "no pair of workers takes requests"

    @property
    def page_tokens(self) -> int:
        """Tokens a KV page; 0 while no worker has registered."""
        return self._answer.page_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus output that workers take; 0 while no worker has registered."""
        return self._answer.max_model_len

    async def run(self) -> None:
        """Announces until cancelled."""
        while True:
            await self.announce()
            self._log_change()
            await asyncio.sleep(INTERVAL_SECONDS if self.is_ready else IMPATIENT_INTERVAL_SECONDS)

    async def announce(self) -> None:
        """One call; a failed one leaves the last answer in place."""
        self._request.log_level = current_level()
        try:
            answer = await self._routers.announce(
                self._request, timeout_seconds=CALL_TIMEOUT_SECONDS
            )
        except EpserveError as error:
            self._silence = error.message
            return
        if answer.log_level:
            _obey(answer.log_level)
        self._answer = answer
        self._metrics.kv_usage.set(answer.kv_usage)
        self._answered_at = self._clock.now()

    def _is_fresh(self) -> bool:
        return (
            self._answered_at is not None and self._clock.now() - self._answered_at < FRESH_SECONDS
        )

    def _log_change(self) -> None:
        """From the start: who is never ready says why."""
        problem, before = self.problem, self._told
        if problem == before:
            return
        self._told = problem
        if not problem:
            log.info("ready")
            return
        # While all processes start, that is no news.
        write = log.warning if before == "" else log.info
        if self._is_fresh():
            write(f"not ready: {problem}")
        else:
            write(f"not ready: {problem}", routers=self._routers.addresses, reason=self._silence)


def _obey(level: str) -> None:
    try:
        previous = set_level(level)
    except ValueError as error:
        log.warning("the router wants a log level that is none", reason=str(error))
    else:
        log.info("log level set", level=level, previous=previous)
