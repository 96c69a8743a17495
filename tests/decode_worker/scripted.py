"""A decode front without processes: real books of a rank, a scripted model and transfer, and a
Prefill server that fails where it is told to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from core.errors import EpserveError, Unavailable
from core.token_ids import pack_ids, unpack_ids
from decode_worker.events import Admit, Grow, Landed, Launched, Outcome, Preempt, RankFacts, Tick
from decode_worker.plan import plan
from decode_worker.service import DecodeService
from decode_worker.state import RankState
from engine.kv.pages import PagePool
from engine.link.kv_notice import KvNotice
from engine.link.messages import FrontMessage, RankMessage, RankStats, Ready, TokenOut
from engine.process.front import WorkerFront
from engine.process.settings import WorkerSettings
from engine.server.worker_metrics import WorkerMetrics
from proto import generate_pb2, generate_pb2_grpc, router_pb2
from rpc.client import channel, to_error
from rpc.server import RpcServer
from tests.eventually import eventually

NUM_LAYERS, PAGE_TOKENS, NUM_PAGES, EOS = 2, 4, 32, 2
# Token ids of the scripted model count upwards from here.
FIRST_TOKEN = 100


class ScriptedRank:
    """Real state and planner; the model says last token + 1, one step each `step_seconds`."""

    def __init__(
        self, index: int, say: Callable[[int, RankMessage], None], kv_seconds: float
    ) -> None:
        facts = RankFacts(
            num_layers=NUM_LAYERS,
            page_tokens=PAGE_TOKENS,
            max_model_len=64,
            max_running=4,
            eos_token_ids=(EOS,),
            kv_arrival_seconds=kv_seconds,
            agent=f"agent{index}".encode(),
            kv_fingerprint="f",
            attempt_prefix=f"d-{index}",
        )
        self.index = index
        self.state = RankState(facts, PagePool(NUM_PAGES))
        self.deaf = False
        self.step_seconds = 0.002
        self._say = say
        self._inbox: list[FrontMessage | KvNotice] = []
        self._awake = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def hear(self, message: FrontMessage | KvNotice) -> None:
        self._inbox.append(message)
        self._awake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._awake.wait()
            self._awake.clear()
            if self.deaf:
                continue
            now = loop.time()
            events, self._inbox = self._inbox, []
            out = [
                message for event in (*events, Tick()) for message in self.state.step(event, now)
            ]
            decided = plan(self.state.snapshot())
            for event in (
                *(Preempt(name) for name in decided.preempt),
                *(Grow(name) for name in decided.grow),
                *(Admit(name) for name in decided.admit),
            ):
                out += self.state.step(event, now)
            last = [self.state.requests[name].last_token_id for name in decided.step]
            outcomes = tuple(Outcome((TokenOut(token_id=token_id + 1),)) for token_id in last)
            for event in (Launched(decided.step), Landed(outcomes)):
                out += self.state.step(event, now)
            for message in out:
                self._say(self.index, message)
            if decided.step:
                await asyncio.sleep(self.step_seconds)
                self._awake.set()


class ScriptedFront:
    """As much of `engine.process.front.WorkerFront` as a service uses."""

    def __init__(self, folder: Path, num_ranks: int = 1, **values: object) -> None:
        (folder / "config.json").write_text("{}")
        values = {"served_model_name": "m", "max_waiting": 4, **values}
        self.settings = WorkerSettings.model_validate({"model": folder, **values})
        self.epoch = "decode-epoch"
        self.draining = False
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_change: Callable[[], None] = lambda: None
        self.on_message: Callable[[int, RankMessage], None] = lambda _rank, _message: None
        self.ranks = [
            ScriptedRank(index, self._hear, self.settings.kv_arrival_seconds)
            for index in range(num_ranks)
        ]
        self.ready = tuple(_ready(index) for index in range(num_ranks))

    @property
    def stats(self) -> tuple[RankStats, ...]:
        counts = [rank.state.pool.counts() for rank in self.ranks]
        return tuple(
            RankStats(pages_owned=count.owned, pages_quarantined=count.quarantined)
            for count in counts
        )

    def as_worker_front(self) -> WorkerFront:
        return cast("WorkerFront", self)

    def send(self, rank: int, message: FrontMessage) -> None:
        self.ranks[rank].hear(message)

    @property
    def is_well(self) -> bool:
        return not self.died.done()

    def _hear(self, rank: int, message: RankMessage) -> None:
        self.on_message(rank, message)

    @property
    def all_free(self) -> bool:
        for rank in self.ranks:
            rank.state.pool.check_integrity()
        return all(rank.state.pool.num_free == NUM_PAGES for rank in self.ranks)


def _ready(index: int) -> Ready:
    return Ready(
        rank=index,
        device="cpu",
        pid=1,
        kv_fingerprint="f",
        page_tokens=PAGE_TOKENS,
        max_model_len=64,
        pages_total=NUM_PAGES,
        max_running=4,
        eos_token_ids=(EOS,),
        vocab_size=256,
    )


@dataclass
class Script:
    """What the Prefill server does with the next calls.

    kv       "all" before the reply, "some" (one layer), "none", "late" (after the reply)
    error    instead of the reply
    hold     the reply waits for this event
    """

    kv: str = "all"
    error: EpserveError | None = None
    hold: asyncio.Event | None = None
    abort_error: EpserveError | None = None
    token_id: int = FIRST_TOKEN
    num_cached_tokens: int = 0


@dataclass
class ScriptedPrefill(generate_pb2_grpc.PrefillServicer):
    """Writes KV by telling the front's ranks, as the transfer would."""

    front: ScriptedFront
    script: Script = field(default_factory=Script)
    calls: list[generate_pb2.PrefillRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    seconds_left: list[float | None] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    num_abort_calls: int = 0

    async def Prefill(  # noqa: N802
        self, request: generate_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.PrefillResponse:
        script = self.script
        self.calls.append(request)
        self.seconds_left.append(context.time_remaining())
        self.called.set()
        try:
            if script.kv in ("all", "some"):
                self.write(request, num_layers=NUM_LAYERS if script.kv == "all" else 1)
            if script.hold is not None:
                await script.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.attempt_id)
            raise
        if script.error is not None:
            raise script.error
        if script.kv == "late":
            asyncio.get_running_loop().call_later(
                0.03, lambda: self.write(request, num_layers=NUM_LAYERS)
            )
        # A prompt that was put back goes on counting from its last token.
        token_ids = unpack_ids(request.token_ids)
        again = len(token_ids) > request.num_prompt_tokens
        token_id = token_ids[-1] + 1 if again else script.token_id
        first_token = generate_pb2.Token(token_id=token_id, logprob=-0.5)
        scored = token_ids if request.sampling.prompt_logprobs and not again else ()
        return generate_pb2.PrefillResponse(
            first_token=first_token if request.sampling.max_tokens else None,
            num_cached_tokens=script.num_cached_tokens,
            kv_bytes=1000,
            prompt_logprobs=[generate_pb2.Token(token_id=one, logprob=-1.0) for one in scored],
        )

    async def Abort(  # noqa: N802
        self, request: generate_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.AbortResponse:
        self.num_abort_calls += 1
        if self.script.abort_error is not None:
            raise self.script.abort_error
        self.aborts.append(request.attempt_id)
        return generate_pb2.AbortResponse(was_known=True)

    def write(self, request: generate_pb2.PrefillRequest, num_layers: int) -> None:
        rank = self.front.ranks[int(request.kv_target.agent.decode().removeprefix("agent"))]
        num_pages = sum(run.count for run in request.kv_target.runs)
        rank.hear(KvNotice(request.attempt_id, 0, num_layers, 0, num_pages))


@dataclass
class Cluster:
    """A Decode server and one Prefill server, in this process, over real sockets."""

    front: ScriptedFront
    service: DecodeService
    registry: CollectorRegistry
    decode: generate_pb2_grpc.DecodeStub
    prefill: ScriptedPrefill
    prefill_server: RpcServer

    @property
    def script(self) -> Script:
        return self.prefill.script

    def request(self, request_id: str = "r", **values: object) -> generate_pb2.GenerateRequest:
        sampling = {"max_tokens": 5, **cast("dict[str, Any]", values.pop("sampling", {}))}
        fields: dict[str, Any] = {
            "request_id": request_id,
            "model": "m",
            "prompt_token_ids": range(10, 16),
            "sampling": generate_pb2.SamplingParams(**sampling),
            "prefill": router_pb2.WorkerRef(
                address=self.prefill_server.address, epoch="prefill-epoch"
            ),
            "decode_epoch": "decode-epoch",
            **values,
        }
        for name in ("prompt_token_ids", "output_token_ids"):
            if not isinstance(fields.get(name, b""), bytes):
                fields[name] = pack_ids(fields[name])
        return generate_pb2.GenerateRequest(**fields)

    async def kill_prefill(self) -> None:
        """Its connections break, and its port refuses new ones."""
        await self.prefill_server._server.stop(None)

    async def restart_prefill(self) -> ScriptedPrefill:
        """Another process at the same address, which knows of nothing."""
        self.prefill = ScriptedPrefill(self.front)
        self.prefill_server = await _prefill_server(self.prefill, self.prefill_server.address)
        return self.prefill

    async def quiet(self, seconds: float = 20.0) -> None:
        """Returns when nothing is left of any request anywhere."""
        await eventually(lambda: self.service.is_quiet and self.front.all_free, seconds)
        assert all(not rank.state.requests for rank in self.front.ranks)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


async def _prefill_server(servicer: ScriptedPrefill, listen: str = "127.0.0.1:0") -> RpcServer:
    server = RpcServer(listen)
    server.add(generate_pb2_grpc.add_PrefillServicer_to_server, servicer, generate_pb2, "Prefill")
    await server.start()
    return server


@asynccontextmanager
async def cluster(folder: Path, num_ranks: int = 1, **values: object) -> AsyncIterator[Cluster]:
    """Checks at the end that not one task is left of it."""
    tasks_before = asyncio.all_tasks()
    front = ScriptedFront(folder, num_ranks, **values)
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "decode", lambda: front.stats)
    service = DecodeService(front.as_worker_front(), metrics)
    front.on_message = service.on_message
    server = RpcServer("127.0.0.1:0")
    server.add(generate_pb2_grpc.add_DecodeServicer_to_server, service, generate_pb2, "Decode")
    await server.start()
    prefill = ScriptedPrefill(front)
    prefill_server = await _prefill_server(prefill)
    async with channel(server.address) as peer:
        stub = generate_pb2_grpc.DecodeStub(peer)
        both = Cluster(front, service, registry, stub, prefill, prefill_server)
        yield both
    async with asyncio.timeout(20):
        service.fail_all(Unavailable("over"))
        await server.stop(0.2)
        await service.close()
        await both.prefill_server.stop(0)
        for rank in front.ranks:
            rank.task.cancel()
        await asyncio.gather(*(rank.task for rank in front.ranks), return_exceptions=True)
    left = asyncio.all_tasks() - tasks_before - {asyncio.current_task()}
    assert not left, left


async def collect(call: Any) -> list[generate_pb2.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def ids(responses: list[generate_pb2.GenerateResponse]) -> list[int]:
    return [token.token_id for response in responses for token in response.tokens]


async def failure(call: Any) -> EpserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(collect(call), 20)
    return to_error(caught.value)
