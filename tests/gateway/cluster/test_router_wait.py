"""The router's --max-wait-seconds bounds what a client waits for room before its first token, in
however many calls; the gateway's search and the router's queue together, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import EpserveError, Overloaded, Unavailable
from core.token_ids import pack_ids
from gateway.base.metrics import GatewayMetrics
from gateway.cluster.client import Cluster, GenerateCall
from gateway.cluster.failover_policy import FailoverBounds
from gateway.cluster.job import Prompt
from proto.generate_pb2 import GenerateResponse, SamplingParams, Token
from proto.router_pb2 import AssignRequest
from router import cluster as router_cluster
from router.gateways import GatewayTable
from router.metrics import RouterMetrics
from router.service import RouterService
from router.settings import RouterSettings
from router.workers.table import StatusArrived
from tests.router.statuses import ROLES, make_status
from tests.virtual_time import LoopClock, run_virtually

MAX_WAIT_SECONDS = 5.0
# Bad luck takes this long to show.
TURN_SECONDS = 0.25


class Stage:
    """The router of one prefill and two decode workers, which are full unless told otherwise."""

    def __init__(self) -> None:
        settings = RouterSettings(max_wait_seconds=MAX_WAIT_SECONDS)
        metrics = RouterMetrics(CollectorRegistry())
        self.cluster = router_cluster.Cluster(settings, LoopClock(), metrics)
        self._service = RouterService(self.cluster, GatewayTable(), LoopClock(), metrics)
        self.is_connected = True
        self.say("prefill", "p")
        for name in ("d0", "d1"):
            self.say("decode", name, max_running=1, num_running=1)

    def say(self, role: str, epoch: str, **facts: int) -> None:
        self.cluster.apply(StatusArrived(epoch, ROLES[role], make_status(role, epoch, **facts)))

    def at(self, seconds: float, name: str, *, num_running: int) -> None:
        """What decode worker `name` says then; it has room for one request."""
        facts = {"max_running": 1, "num_running": num_running}
        asyncio.get_running_loop().call_at(seconds, lambda: self.say("decode", name, **facts))

    async def assign(
        self,
        make_request: Callable[[], AssignRequest],
        *,
        first_page: int | None,
        timeout_seconds: float,
    ) -> bytes:
        context: Any = None
        return (await self._service.Assign(make_request(), context)).SerializeToString()


class Workers:
    """Each call gets the next answers; an error ends it."""

    def __init__(self, *calls: list[int | EpserveError]) -> None:
        self._calls = list(calls)

    @asynccontextmanager
    async def lease(self, worker: Any) -> AsyncIterator["Workers"]:
        yield self

    @contextmanager
    def call(self, *request: Any, **options: Any) -> Iterator["Workers"]:
        self._answers = self._calls.pop(0)
        yield self

    async def take(self) -> bytes:
        await asyncio.sleep(TURN_SECONDS)
        answer = self._answers.pop(0)
        if isinstance(answer, EpserveError):
            raise answer
        return GenerateResponse(tokens=[Token(token_id=answer)]).SerializeToString()


async def tokens_of(stage: Stage, workers: Workers, *, max_tokens: int) -> list[int]:
    cluster = Cluster(
        routers=stage,  # type: ignore[arg-type]
        channels=workers,  # type: ignore[arg-type]
        metrics=GatewayMetrics(),
        clock=LoopClock(),
        model="demo",
        vocab_size=100,
        eos_token_ids=(0,),
        bounds=FailoverBounds(
            max_attempts=16, failover_seconds=1.5, replacement_seconds=30, router_seconds=5
        ),
    )
    call = GenerateCall(
        cluster,
        request_id="r",
        prompt=Prompt(token_ids=pack_ids([1, 2, 3]), max_tokens=max_tokens),
        sampling=SamplingParams(),
        deadline=600.0,
    )
    return [token.token_id async for batch in call.batches() for token in batch.tokens]


def seconds() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [[Overloaded("every rank's queue is full")]],
        [[Unavailable("lost")]],
        [[Unavailable("lost")], [Unavailable("lost")]],
    ],
    ids=["no place", "refused once", "lost once", "lost twice"],
)
def test_the_wait_is_one_however_often_it_is_interrupted(calls: list[Any]) -> None:
    async def scenario() -> None:
        stage = Stage()
        for number in range(len(calls)):
            stage.at(4.0 + 0.5 * number, f"d{number}", num_running=0)
        with pytest.raises(Overloaded, match="full"):
            await tokens_of(stage, Workers(*calls), max_tokens=3)
        assert seconds() == pytest.approx(MAX_WAIT_SECONDS + TURN_SECONDS * len(calls))

    run_virtually(scenario())


def test_room_is_taken_also_when_the_wait_is_over() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.at(MAX_WAIT_SECONDS - 0.01, "d0", num_running=0)
        stage.at(MAX_WAIT_SECONDS + 0.1, "d1", num_running=0)
        assert await tokens_of(stage, Workers([Unavailable("lost")], [7]), max_tokens=1) == [7]

    run_virtually(scenario())


def test_a_request_whose_client_has_tokens_waits_for_room_until_its_deadline() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.at(4.0, "d0", num_running=0)
        workers = Workers([7, Unavailable("lost")], [8])
        stage.at(4.4, "d0", num_running=1)
        stage.at(4.1 * MAX_WAIT_SECONDS, "d1", num_running=0)
        assert await tokens_of(stage, workers, max_tokens=2) == [7, 8]
        assert seconds() > 4 * MAX_WAIT_SECONDS

    run_virtually(scenario())
