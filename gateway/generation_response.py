"""The response to a generation request: runs it, streams or collects it, ends it with the client.

nothing sent yet   an error becomes an HTTP status with OpenAI's error object
stream has begun   an error becomes one event with that object, and the stream ends
not let in yet     nothing is sent: a refusal is to have its status and its Retry-After
nothing to send    a stream begins, or goes on, with a comment every `ping_seconds`
client gone        everything that was started for it is cancelled at once
client not reading the same after `reader_stall_seconds`, or a moment after the deadline
"""

from typing import NamedTuple

from fastapi import Response
from starlette.types import Receive, Scope, Send

from core.clock import Clock
from core.errors import EpserveError, InternalError
from core.log import get_logger
from gateway.base.metrics import GatewayMetrics
from gateway.cluster.job import Job
from gateway.cluster.run import RequestRun
from gateway.http.http_protocol import CONNECTION
from gateway.http.reply_sender import ReplySender
from gateway.http.request_trace import describe_end
from gateway.http.response_guard import Bounds, ResponseGuard
from gateway.limits.admission import Admission
from gateway.limits.api_keys import Client
from gateway.limits.key_guard import CLIENT
from gateway.limits.rate_limit import RateLimiter
from gateway.limits.token_meter import TokenMeter
from gateway.output.choice_delta import ChoiceDelta, join_deltas
from gateway.replies.reply_form import ReplyForm

log = get_logger("gateway.generation")

# The workers' own answer to a deadline is better than ours: they get a moment to give it.
PATIENCE_SECONDS = 1.0


class Serving(NamedTuple):
    """What all generation responses share."""

    admission: Admission
    metrics: GatewayMetrics
    clock: Clock
    limiter: RateLimiter
    ping_seconds: float
    reader_stall_seconds: float


class GenerationResponse(Response):
    """An ASGI response of its own: Starlette's streaming one cannot see an error before the
    first byte, nor a client that leaves while there is nothing to send."""

    background = None  # for the framework

    def __init__(self, job: Job, run: RequestRun, reply: ReplyForm, serving: Serving) -> None:
        # Without the base's own: its body and headers are never sent.
        self._job = job
        self._run = run
        self._reply = reply
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises EpserveError only while nothing has been sent."""
        outcome = "internal"
        client: Client | None = scope.get(CLIENT)
        serving = self._serving
        meter = TokenMeter(serving.limiter, client, self._run)
        sender = ReplySender(send, serving.clock, self._reply.ping)
        bounds = Bounds(
            give_up_at=self._job.deadline + PATIENCE_SECONDS,
            ping_seconds=serving.ping_seconds if self._job.stream else 0.0,
            reader_stall_seconds=serving.reader_stall_seconds,
        )
        try:
            with ResponseGuard(scope[CONNECTION], sender, bounds, serving.clock) as response_guard:
                outcome = await self._work(sender, meter)
            outcome = response_guard.outcome or outcome
        except EpserveError as error:
            outcome = error.status.code
            raise
        finally:
            await sender.close()
            meter.end()
            self._record(outcome, client)
            describe_end(scope, self._run, outcome)

    async def _work(self, sender: ReplySender, meter: TokenMeter) -> str:
        """Returns the outcome: ok, or the code of an error that the client was told in the
        stream."""
        try:
            meter.begin()
            async with self._serving.admission.slot(self._run, self._job.priority):
                sender.begin_work()
                meter.note_admitted()
                if self._job.stream:
                    await self._stream(sender, meter)
                else:
                    await self._collect(sender, meter)
            return "ok"
        except EpserveError as error:
            if not sender.has_begun:
                raise
            outcome = error.status.code
            content = self._reply.failure(error)
            log.warning("stream ended early", code=outcome, message=error.message)
            error.__traceback__ = None  # as in `gateway.http.direct_routes`
        except Exception:
            if not sender.has_begun:
                raise
            log.exception("stream ended by an unexpected exception")
            outcome = "internal"
            content = self._reply.failure(InternalError("internal error"))
        await sender.events(content, more=False)
        return outcome

    async def _collect(self, sender: ReplySender, meter: TokenMeter) -> None:
        parts: list[list[ChoiceDelta]] = [[] for _ in range(self._job.num_choices)]
        async with self._run as run:
            async for deltas in run:
                for index, delta in deltas:
                    parts[index].append(delta)
                meter.note()
        choices = [join_deltas(parts[index]) for index in self._run.returned()]
        await sender.whole(self._reply.whole(choices, self._run.usage()))

    async def _stream(self, sender: ReplySender, meter: TokenMeter) -> None:
        last = b""
        async with self._run as run:
            opened: set[int] = set()
            async for deltas in run:
                events = self._events(deltas, opened)
                if run.is_over:
                    last = events  # goes out with the end
                    break
                if events:  # thoughts that are left out are silence: pings are due
                    await sender.events(events)
                meter.note()
        await sender.events(last + self._reply.ending(run.usage()), more=False)

    def _events(self, deltas: list[tuple[int, ChoiceDelta]], opened: set[int]) -> bytes:
        """All that is new in one write."""
        if self._job.continuous_usage:
            self._reply.note_usage(self._run.usage())
        events = []
        for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                events.append(self._reply.opening(index, self._run.usage()))
            events.append(self._reply.events(index, delta))
        return b"".join(events)

    def _record(self, outcome: str, client: Client | None) -> None:
        usage = self._run.usage()
        seconds = self._serving.clock.now() - self._job.arrived_at
        self._serving.metrics.note_end(
            outcome,
            seconds,
            num_prompt=usage.prompt_tokens,
            num_cached=usage.cached_tokens,
            num_generated=usage.completion_tokens,
        )
        log.info(
            "generation ended",
            id=self._job.id,
            client=client.name if client is not None else None,
            outcome=outcome,
            endpoint=self._job.endpoint,
            stream=self._job.stream,
            num_choices=self._job.num_choices,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            num_moves=self._run.num_moves,
            seconds=round(seconds, 6),
        )
