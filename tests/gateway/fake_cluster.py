"""A router and decode workers that do as they are told, on real sockets.

What a worker generates is a function of the request alone (`tokens_of`), as with the real
ones: a request that moves to another worker goes on where it was.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc

from core.errors import EpserveError, Mismatch, Unavailable
from core.token_ids import unpack_ids
from core.trace_context import TRACE, TraceContext
from proto import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc
from proto.generate_pb2 import GenerateRequest, GenerateResponse, Token, TokenLogprob
from rpc.server import RpcServer

PAGE_TOKENS = 16

Context = grpc.aio.ServicerContext[Any, Any]
TokensOf = Callable[[GenerateRequest], list[int]]


@dataclass
class Plan:
    """How one worker treats the calls it gets.

    fail_after     tokens of a call after which it fails with `error` (or, with `error` None,
                   just ends)
    refusals       errors for the next calls, before any token
    hang_after     tokens of a call after which it says nothing more
    step_tokens    tokens in one message
    step_seconds   between messages
    finish         whether the last message has its finish reason
    """

    fail_after: int | None = None
    error: EpserveError | None = None
    refusals: deque[EpserveError] = field(default_factory=deque)
    hang_after: int | None = None
    step_tokens: int = 1
    step_seconds: float = 0.0
    finish: bool = True
    num_cached_tokens: int = 0
    bad_token_id: int | None = None


class FakeDecode(generate_pb2_grpc.DecodeServicer):
    """One decode worker. `cancelled` is set when the gateway gave up a call."""

    def __init__(self, name: str, tokens_of: TokensOf, eos_id: int) -> None:
        self.name = name
        self.epoch = f"epoch-{name}"
        self.plan = Plan()
        self.requests: list[GenerateRequest] = []
        self.request_ids: list[str] = []
        self.traces: list[TraceContext | None] = []
        self.num_running = 0
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.server: RpcServer
        self._tokens_of = tokens_of
        self._eos_id = eos_id

    def reset(self) -> None:
        self.plan = Plan()
        self.requests.clear()
        self.request_ids.clear()
        self.traces.clear()
        self.cancelled.clear()
        self.started.clear()

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self.server = RpcServer(listen)
        self.server.add(
            generate_pb2_grpc.add_DecodeServicer_to_server, self, generate_pb2, "Decode"
        )
        await self.server.start()

    @property
    def ref(self) -> router_pb2.WorkerRef:
        return router_pb2.WorkerRef(address=self.server.address, epoch=self.epoch, name=self.name)

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        if request.decode_epoch != self.epoch:
            raise Mismatch("another epoch")
        self.requests.append(request)
        metadata = dict(context.invocation_metadata() or ())
        self.request_ids.append(str(metadata.get("x-request-id", "")))
        self.traces.append(TRACE.get())
        if self.plan.refusals:
            raise self.plan.refusals.popleft()
        self.num_running += 1
        self.started.set()
        was_left = True
        try:
            async for response in self._responses(request):
                yield response
            was_left = False
        except EpserveError:
            was_left = False
            raise
        finally:
            self.num_running -= 1
            # A call that is cancelled while it sends only sees its generator closed.
            if was_left:
                self.cancelled.set()

    async def _responses(self, request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        plan = self.plan
        tokens, reason = self._planned(request)
        position = len(unpack_ids(request.output_token_ids))
        num_sent = 0
        while True:
            limit = plan.step_tokens
            for bound in (plan.fail_after, plan.hang_after):
                if bound is not None:
                    limit = min(limit, bound - num_sent)
            batch = tokens[position : position + limit]
            position += len(batch)
            is_last = position == len(tokens)
            if batch or is_last:
                yield GenerateResponse(
                    tokens=[self._token(request, token_id) for token_id in batch],
                    finish_reason=reason if is_last and plan.finish else 0,
                    num_cached_tokens=plan.num_cached_tokens if num_sent == 0 else 0,
                    prompt_logprobs=self._prompt_logprobs(request) if num_sent == 0 else [],
                )
            num_sent += len(batch)
            if num_sent == plan.fail_after:
                if plan.error is not None:
                    raise plan.error
                return
            if num_sent == plan.hang_after:
                await asyncio.Event().wait()
            if is_last:
                return
            await asyncio.sleep(plan.step_seconds)

    def _planned(self, request: GenerateRequest) -> tuple[list[int], int]:
        """All output tokens, earlier attempts' included, and why they end."""
        sampling = request.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {self._eos_id})
        tokens: list[int] = []
        if sampling.max_tokens == 0:
            return tokens, generate_pb2.FINISH_REASON_LENGTH
        for token_id in self._tokens_of(request):
            tokens.append(token_id)
            if token_id in stops and len(tokens) >= sampling.min_tokens:
                return tokens, generate_pb2.FINISH_REASON_STOP
            if len(tokens) == sampling.max_tokens:
                break
        return tokens, generate_pb2.FINISH_REASON_LENGTH

    def _token(self, request: GenerateRequest, token_id: int) -> Token:
        if self.plan.bad_token_id is not None:
            return Token(token_id=self.plan.bad_token_id)
        if not request.sampling.logprobs:
            return Token(token_id=token_id)
        return _with_logprob(token_id, request.sampling.top_logprobs)

    def _prompt_logprobs(self, request: GenerateRequest) -> list[Token]:
        if not request.sampling.prompt_logprobs:
            return []
        first, *others = unpack_ids(request.prompt_token_ids)
        num_top = request.sampling.top_prompt_logprobs
        return [Token(token_id=first), *(_with_logprob(one, num_top) for one in others)]


def _with_logprob(token_id: int, num_top: int) -> Token:
    top = [
        TokenLogprob(token_id=(token_id + rank) % 256 + 4, logprob=-float(rank + 1))
        for rank in range(num_top)
    ]
    return Token(token_id=token_id, logprob=-token_id / 16, top_logprobs=top, has_logprob=True)


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Hands out the first decode worker that is not excluded."""

    def __init__(self) -> None:
        self.decodes: list[FakeDecode] = []
        self.ready = True
        self.problem = ""
        self.model = ""
        self.max_model_len = 0
        self.kv_usage = 0.25
        self.log_level = ""
        self.queue_seconds = 0.0
        self.errors: deque[EpserveError] = deque()
        self.hang = False
        # Awaited in front of each assignment, and may raise instead of it.
        self.before: Callable[[router_pb2.AssignRequest], Awaitable[None]] | None = None
        self.requests: list[router_pb2.AssignRequest] = []
        self.announcements: list[router_pb2.AnnounceRequest] = []
        self.cancelled = asyncio.Event()
        self.announced = asyncio.Event()
        self.down: set[str] = set()  # epochs that are not routable
        self.server: RpcServer

    def reset(self) -> None:
        self.ready, self.hang, self.before = True, False, None
        self.queue_seconds = 0.0
        self.max_model_len = 0
        self.errors.clear()
        self.requests.clear()
        self.down.clear()
        self.cancelled.clear()
        for decode in self.decodes:
            decode.reset()

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self.server = RpcServer(listen)
        self.server.add(
            router_pb2_grpc.add_RouterServicer_to_server,
            self,
            router_pb2,
            "Router",
            multiplexed=("Assign",),
        )
        await self.server.start()

    async def Assign(
        self, request: router_pb2.AssignRequest, context: Context
    ) -> router_pb2.AssignResponse:
        self.requests.append(request)
        if self.errors:
            raise self.errors.popleft()
        if self.before is not None:
            await self.before(request)
        if self.hang:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        for decode in self.decodes:
            if decode.epoch not in {*request.exclude_epochs, *self.down}:
                prefill = router_pb2.WorkerRef(
                    address="127.0.0.1:1", epoch="epoch-prefill", name="prefill-0"
                )
                return router_pb2.AssignResponse(
                    prefill=prefill, decode=decode.ref, queue_seconds=self.queue_seconds
                )
        raise Unavailable("no pair of workers is up")

    async def Announce(
        self, request: router_pb2.AnnounceRequest, context: Context
    ) -> router_pb2.AnnounceResponse:
        self.announcements.append(request)
        self.announced.set()
        return router_pb2.AnnounceResponse(
            model=self.model,
            page_tokens=PAGE_TOKENS,
            max_model_len=self.max_model_len,
            kv_usage=self.kv_usage,
            log_level=self.log_level,
            ready=self.ready,
            problem=self.problem,
        )


class FakeCluster:
    """A router and two decode workers."""

    def __init__(self, tokens_of: TokensOf, eos_id: int) -> None:
        self.router = FakeRouter()
        self.first, self.second = (
            FakeDecode(name, tokens_of, eos_id) for name in ("decode-0", "decode-1")
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "FakeCluster":
        for server in (self.router, self.first, self.second):
            await server.start()
            self._stack.push_async_callback(self._stop, server)
        self.router.decodes = [self.first, self.second]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @staticmethod
    async def _stop(one: FakeRouter | FakeDecode) -> None:
        """Whatever server it has by now: some tests restart theirs."""
        await one.server.stop(0)
