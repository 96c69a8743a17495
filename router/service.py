"""The Router gRPC service, for gateways."""

import math
from asyncio import CancelledError
from typing import Any

import grpc

from core import tracing
from core.clock import Clock
from core.errors import EpserveError, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from core.hashing import unpack_hashes
from core.log import REQUEST_ID
from core.trace_context import TRACE
from proto import router_pb2
from proto.router_pb2_grpc import RouterServicer
from router.cluster import Cluster
from router.gateways import GatewayTable
from router.metrics import RouterMetrics
from router.scheduling.choose import capacity_tokens
from router.scheduling.demand import Demand
from router.scheduling.pairing import Pool, complete, pools
from router.workers.worker import WorkerState

Context = grpc.aio.ServicerContext[Any, Any]

MAX_EXCLUDED = 256


class RouterService(RouterServicer):
    def __init__(
        self, cluster: Cluster, gateways: GatewayTable, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._cluster = cluster
        self._gateways = gateways
        self._clock = clock
        self._metrics = metrics

    async def Assign(
        self, request: router_pb2.AssignRequest, context: Context
    ) -> router_pb2.AssignResponse:
        began = self._clock.now()
        outcome = "error"
        try:
            demand = demand_of(request)
            assignment = await self._cluster.assigner.assign(demand)
            outcome = "ok"
        except CancelledError:
            outcome = "cancelled"
            raise
        except EpserveError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._metrics.count_assign(outcome)
        self._metrics.assign_seconds.observe(self._clock.now() - began)
        pair = assignment.pair
        tracing.record_last("queue", TRACE.get(), assignment.queue_seconds)
        self._metrics.count_prefix(
            num_matched=pair.num_matched_pages, num_pages=len(demand.prefix_hashes)
        )
        return router_pb2.AssignResponse(
            prefill=pair.prefill.reference(),
            decode=pair.decode.reference(),
            queue_seconds=assignment.queue_seconds,
        )

    async def Announce(
        self, request: router_pb2.AnnounceRequest, context: Context
    ) -> router_pb2.AnnounceResponse:
        gateway = self._gateways.announce(request, self._clock.now())
        registered = [
            worker
            for worker in self._cluster.table.workers
            if worker.state in (WorkerState.READY, WorkerState.DRAINING)
        ]
        serving = [w for w in registered if w.status.model == request.model] or registered
        ready = complete(pools(w for w in serving if w.state is WorkerState.READY))
        # Should there be several, the pool with most decode workers.
        best = max(
            (ready or pools(serving)).items(),
            key=lambda item: (len(item[1].decode), item[0]),
            default=None,
        )
        if best is None:
            problem = self._cluster.assigner.problem(request.model)
            return router_pb2.AnnounceResponse(log_level=gateway.wanted_log_level, problem=problem)
        key, pool = best
        problem = self._cluster.assigner.problem(request.model or key.model)
        return router_pb2.AnnounceResponse(
            model=key.model,
            page_tokens=key.page_tokens,
            max_model_len=_max_model_len(pool),
            ready=not problem,
            problem=problem,
            log_level=gateway.wanted_log_level,
            kv_usage=_kv_usage(pool),
        )


def demand_of(request: router_pb2.AssignRequest) -> Demand:
    if request.num_prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    try:
        prefix_hashes = unpack_hashes(request.prefix_hashes)
    except ValueError as error:
        raise InvalidRequest(f"prefix_hashes: {error}", param="prefix_hashes") from error
    if len(prefix_hashes) > request.num_prompt_tokens:
        raise InvalidRequest("more prefix_hashes than prompt tokens", param="prefix_hashes")
    if len(request.exclude_epochs) > MAX_EXCLUDED:
        raise InvalidRequest(f"more than {MAX_EXCLUDED} epochs excluded", param="exclude_epochs")
    for name in ("waited_seconds", "searched_seconds"):
        if not 0 <= getattr(request, name) < math.inf:
            raise InvalidRequest(f"{name} is no duration", param=name)
    return Demand(
        request_id=request.request_id,
        model=request.model,
        num_prompt_tokens=request.num_prompt_tokens,
        prefix_hashes=prefix_hashes,
        excluded=frozenset(request.exclude_epochs),
        priority=request.priority,
        waited_seconds=request.waited_seconds,
        searched_seconds=request.searched_seconds,
        traced_id=REQUEST_ID.get(),
    )


def _max_model_len(pool: Pool) -> int:
    """Tokens, prompt plus output, that the pool's most capable pair can hold."""
    if not (pool.prefill and pool.decode):
        return max(worker.status.max_model_len for worker in (*pool.prefill, *pool.decode))
    lengths = [
        max(worker.status.max_model_len for worker in workers)
        for workers in (pool.prefill, pool.decode)
    ]
    return min(*lengths, capacity_tokens(pool) + 1)


def _kv_usage(pool: Pool) -> float:
    """0 to 1, as the pool's decode workers last said."""
    num_pages = sum(worker.load.pages_total for worker in pool.decode)
    num_free = sum(worker.load.pages_free for worker in pool.decode)
    return 1 - num_free / num_pages if num_pages else 0.0


def _outcome(error: EpserveError) -> str:
    outcomes: dict[type[EpserveError], str] = {
        InvalidRequest: "invalid",
        ModelNotFound: "not_found",
        Overloaded: "overloaded",
        Unavailable: "unavailable",
    }
    return next((name for cls, name in outcomes.items() if isinstance(error, cls)), "error")
