"""The way of one choice through the cluster: assigned, generated, moved when a worker fails.

    leg = GenerateCall(cluster, request_id, prompt, sampling, deadline)
    async with aclosing(leg.batches()) as batches:
        async for batch in batches: ...          # each token exactly once, in order

What a failure means:

    from Assign     UNAVAILABLE          ask again for a while, then give up
                    anything else        give up
    from Generate   RESOURCE_EXHAUSTED   another decode worker once, then give up
                    UNAVAILABLE, FAILED_PRECONDITION, CANCELLED, end without a finish reason,
                    answer that makes no sense
                                         another pair, carrying on after the tokens received
                    anything else        give up

How often and how long: `gateway.cluster.failover_policy`.

Closing `batches()` cancels the call in progress, and with it the request on both workers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from core import tracing
from core.clock import Clock
from core.errors import (
    DeadlineExceeded,
    Draining,
    EpserveError,
    Unavailable,
)
from core.hashing import HASH_BYTES, unpack_hashes
from core.log import get_logger
from core.request_ids import call_id
from core.token_ids import pack_ids
from gateway.base.metrics import GatewayMetrics
from gateway.cluster.channels import ChannelPool
from gateway.cluster.failover_policy import FailoverBounds, FailoverPolicy
from gateway.cluster.job import Prompt
from gateway.cluster.routers import Routers
from proto.generate_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    Token,
)
from proto.router_pb2 import AssignRequest, AssignResponse
from rpc.multiplex_client import Call, MultiplexClient

log = get_logger("gateway.client")

GENERATE = "/epserve.generate.v1.Decode/Generate"


class TokenBatch(NamedTuple):
    """Tokens that arrived together; the last batch has a finish reason."""

    tokens: Sequence[Token]
    finish: "FinishReason.ValueType"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What all legs share; bounds as in the settings of the same names."""

    routers: Routers
    channels: ChannelPool
    metrics: GatewayMetrics
    clock: Clock
    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bounds: FailoverBounds


class GenerateCall:
    """One choice. `num_cached_tokens`, `queue_seconds` and, where asked for, `prompt_logprobs`
    are known with the first batch.

    `prefix_hashes` are those of the prompt's pages (`core.hashing`); empty where their size is not
    known yet.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        deadline: float,
        prefix_hashes: bytes = b"",
        priority: int = 0,
    ) -> None:
        self.output_token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_accepted_drafts = 0
        self.num_rejected_drafts = 0
        self.prompt_logprobs: Sequence[Token] = ()
        self.queue_seconds = 0.0
        self.num_moves = 0
        self._cluster = cluster
        self._request_id = request_id
        self._prompt = prompt
        self._sampling = sampling
        self._deadline = deadline
        self._priority = priority
        self._prefix_hashes = prefix_hashes
        self._first_page = next(iter(unpack_hashes(prefix_hashes[:HASH_BYTES])), None)
        self._num_calls = 0
        self._asked_at: float | None = None  # for the first time
        self._searched_seconds = 0.0  # for pairs found so far
        self._search_began = 0.0  # as if the earlier searches had gone on until this one
        self._policy = FailoverPolicy(cluster.bounds)
        self._is_searching = True  # something is to be forgotten with the next token

    async def batches(self) -> AsyncGenerator[TokenBatch]:
        """All tokens of the choice, over however many pairs it takes.

        Raises the EpserveError for which no pair could finish it.
        """
        while True:
            pair = await self._assign()
            async with self._cluster.channels.lease(pair.decode) as calls:
                try:
                    with (
                        tracing.begin("generate", tracing.Kind.CLIENT) as span,
                        self._generate(calls, pair, span) as call,
                    ):
                        # Messages that waited together are read as one: a late choice
                        # catches up.
                        while content := await call.take():
                            batch = self._accept(GenerateResponse.FromString(content), pair)
                            yield batch
                            if batch.finish != FINISH_REASON_UNSPECIFIED:
                                return
                        raise Unavailable("the decode worker gave no finish reason")
                except DecodeError:
                    error: EpserveError = Unavailable(
                        "the decode worker sent no message", failed_epoch=pair.decode.epoch
                    )
                except EpserveError as failure:
                    error = failure.with_traceback(None)  # which would hold this frame
            self._note_failure(pair, error)

    def note_begun(self) -> None:
        """The client has tokens of this request, of another choice."""
        self._policy.note_begun()

    def _generate(self, calls: MultiplexClient, pair: AssignResponse, span: tracing.Span) -> Call:
        # An id of its own for each call: the one before may still be ending on that worker.
        request_id = call_id(self._request_id, self._num_calls)
        self._num_calls += 1
        sampling = self._sampling
        if self.prompt_logprobs:
            # Nothing that has arrived is worked out again.
            sampling.prompt_logprobs = False
        request = GenerateRequest(
            request_id=request_id,
            model=self._cluster.model,
            prompt_token_ids=self._prompt.token_ids,
            output_token_ids=pack_ids(self.output_token_ids),
            sampling=sampling,
            prefill=pair.prefill,
            decode_epoch=pair.decode.epoch,
            priority=self._priority,
            prefix_hashes=self._prefix_hashes,
        )
        if span.is_recording:
            span.note(
                {
                    "epserve.leg_id": request_id,
                    "epserve.prefill": pair.prefill.name,
                    "epserve.decode": pair.decode.name,
                    "epserve.num_earlier_tokens": len(self.output_token_ids),
                }
            )
        return calls.call(
            GENERATE,
            request.SerializeToString(),
            timeout_seconds=self._remaining_seconds(),
            trace=span.context,
        )

    # ---- assignment

    async def _assign(self) -> AssignResponse:
        """A pair, waiting for one as long as the search has patience."""
        self._search_began = self._cluster.clock.now() - self._searched_seconds
        while True:
            asking = self._cluster.routers.assign(
                self._assign_request,
                first_page=self._first_page,
                timeout_seconds=self._remaining_seconds(),
            )
            try:
                pair = _pair_of(await asking)
            except EpserveError as failure:
                error = failure
            else:
                self.queue_seconds += pair.queue_seconds
                self._searched_seconds = self._cluster.clock.now() - self._search_began
                return pair
            self._is_searching = True
            try:
                seconds = self._policy.note_no_pair(
                    error,
                    self._cluster.clock.now(),
                    router_is_there=self._cluster.routers.is_connected,
                )
            except EpserveError as told:
                self._note_end(error, told)
                raise
            await asyncio.sleep(seconds)

    def _assign_request(self) -> AssignRequest:
        num_output = len(self.output_token_ids)
        now = self._cluster.clock.now()
        if self._asked_at is None:
            self._asked_at = now
        return AssignRequest(
            request_id=self._request_id,
            model=self._cluster.model,
            num_prompt_tokens=self._prompt.num_tokens + num_output,
            max_new_tokens=self._prompt.max_tokens - num_output,
            prefix_hashes=self._prefix_hashes,
            exclude_epochs=self._policy.excluded_epochs,
            priority=self._priority,
            waited_seconds=now - self._asked_at,
            searched_seconds=0.0 if self._policy.has_begun else now - self._search_began,
        )

    # ---- answers and failures

    def _accept(self, response: GenerateResponse, pair: AssignResponse) -> TokenBatch:
        """Counts the tokens as received. Raises Unavailable when they make no sense."""
        token_ids = [token.token_id for token in response.tokens]
        if len(response.prompt_logprobs) > self._prompt.num_tokens:
            raise Unavailable(
                "the decode worker sent log-probabilities that cannot be",
                failed_epoch=pair.decode.epoch,
            )
        too_many = len(self.output_token_ids) + len(token_ids) > self._prompt.max_tokens
        if too_many or (token_ids and max(token_ids) >= self._cluster.vocab_size):
            raise Unavailable(
                "the decode worker sent tokens that cannot be", failed_epoch=pair.decode.epoch
            )
        if response.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = response.prompt_logprobs
        if not self.output_token_ids:
            self.num_cached_tokens = max(self.num_cached_tokens, response.num_cached_tokens)
        self.num_accepted_drafts += response.num_accepted_drafts
        self.num_rejected_drafts += response.num_rejected_drafts
        if token_ids:
            self.output_token_ids += token_ids
            if self._is_searching:
                self._is_searching = False
                self._policy = FailoverPolicy(self._cluster.bounds, has_begun=True)
        return TokenBatch(response.tokens, response.finish_reason or self._finish_reached())

    def _note_failure(self, pair: AssignResponse, error: EpserveError) -> None:
        """Remembers whom to leave out; raises what the client is told when it is time to give
        up."""
        blamed_epoch = error.failed_epoch or pair.decode.epoch
        self._is_searching = True
        try:
            self._policy.note_failure(error, blamed_epoch, self._cluster.clock.now())
        except EpserveError as told:
            self._note_end(error, told, pair)
            raise
        self.num_moves += 1
        self._cluster.metrics.count_move(error.status.code)
        self._log_failure("request moves to other workers", error, pair)

    def _note_end(
        self, error: EpserveError, told: EpserveError, pair: AssignResponse | None = None
    ) -> None:
        """What the client is told need not say what happened: the log does."""
        if told is not error:
            self._log_failure("request is given up", error, pair)

    def _log_failure(self, event: str, error: EpserveError, pair: AssignResponse | None) -> None:
        workers = {} if pair is None else {"prefill": pair.prefill.name, "decode": pair.decode.name}
        log.log(
            logging.INFO if isinstance(error, Draining) else logging.WARNING,
            event,
            choice=self._request_id,
            reason=error.status.code,
            message=error.message,
            num_tokens=len(self.output_token_ids),
            **workers,
        )

    def _finish_reached(self) -> "FinishReason.ValueType":
        """Whether the tokens received are all there will be, though the worker did not say so:
        if it died after the last token, there would be nothing to ask another one for."""
        if len(self.output_token_ids) >= self._prompt.max_tokens:
            return FINISH_REASON_LENGTH
        if len(self.output_token_ids) < max(1, self._sampling.min_tokens):
            return FINISH_REASON_UNSPECIFIED
        last = self.output_token_ids[-1]
        is_eos = last in self._cluster.eos_token_ids and not self._sampling.ignore_eos
        ended = is_eos or last in self._sampling.stop_token_ids
        return FINISH_REASON_STOP if ended else FINISH_REASON_UNSPECIFIED

    def _remaining_seconds(self) -> float:
        """Until the deadline. Raises DeadlineExceeded after it."""
        seconds = self._deadline - self._cluster.clock.now()
        if seconds <= 0:
            raise DeadlineExceeded("the request's deadline is over")
        return seconds


def _pair_of(content: bytes) -> AssignResponse:
    """Raises Unavailable when the router's answer makes no sense."""
    try:
        pair = AssignResponse.FromString(content)
    except DecodeError as error:
        raise Unavailable("the router sent no message") from error
    if not pair.decode.address:
        raise Unavailable("the router named no pair of workers")
    return pair
