"""All choices of one request at work: their legs started, their pieces merged, their tokens
counted.

    async with RequestRun(job, ...) as run:
        async for pieces in run: ...      # [(choice, ChoiceDelta), ...], all that is there by now
        run.usage()

Leaving the block cancels whatever still runs, on this machine and on the workers.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from core.errors import EpserveError
from core.hashing import prefix_hashes
from core.request_ids import choice_id
from gateway.cluster.client import Cluster, GenerateCall, TokenBatch
from gateway.cluster.job import Job
from gateway.output.chat_output import ChatOutput
from gateway.output.choice_delta import ChoiceDelta
from gateway.output.output_text import OutputText
from gateway.output.tool_call_parser import ToolCallParser
from gateway.prompt.prompt_echo import PromptEcho
from gateway.requests.sampling_fields import choice_seed
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import FINISH_REASON_STOP, SamplingParams

# Pieces that wait for a slow client; past it nothing more is read from the workers.
MAX_DELTAS = 256


class Usage(NamedTuple):
    """Tokens of the whole request: each prompt counts once, the output of every choice."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None  # None: thoughts are not told apart
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    index: int
    call: GenerateCall
    text: OutputText | ChatOutput
    echo: PromptEcho | None


class RequestRun:
    """One request in progress."""

    def __init__(
        self, job: Job, cluster: Cluster, tokenizer: Tokenizer, *, page_tokens: int
    ) -> None:
        """`page_tokens` is that of the pages whose hashes the router wants; 0: not known yet."""
        self._job = job
        self._clock = cluster.clock
        self._metrics = cluster.metrics
        # Once a prompt, however many choices it has.
        hashes = [
            prefix_hashes(prompt.token_ids, page_tokens) if page_tokens else b""
            for prompt in job.prompts
        ]
        self._choices = [
            _make_choice(index, job, cluster, tokenizer, hashes[index // job.num_per_prompt])
            for index in range(job.num_choices)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._deltas: list[tuple[int, ChoiceDelta]] = []
        self._changed = asyncio.Event()  # there is something for the reader
        self._room = asyncio.Event()  # there is room for another piece
        self._room.set()
        self._has_ended = False  # some choice has, or the whole run
        self._stop_error: EpserveError | None = None
        # A single choice is read by whoever reads the run, without a task of its own.
        self._alone: AsyncGenerator[tuple[int, ChoiceDelta]] | None = None
        self._reader: asyncio.Task[Any] | None = None  # while it waits for the single choice

    async def __aenter__(self) -> Self:
        if len(self._choices) == 1:
            self._alone = self._pieces_of(self._choices[0])
            return self
        for choice in self._choices:
            task = asyncio.create_task(self._drive(choice))
            task.add_done_callback(self._note_end)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._alone is not None:
            await self._alone.aclose()
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, EpserveError):
                ended.__traceback__ = None  # whose frames know it, and this run
        self._tasks.clear()

    def __aiter__(self) -> AsyncIterator[list[tuple[int, ChoiceDelta]]]:
        return self

    async def __anext__(self) -> list[tuple[int, ChoiceDelta]]:
        """Everything new, at least one piece. Raises the first choice's error there is, once
        the pieces before it are out."""
        if self._alone is not None:
            if self._stop_error is not None:
                raise self._stop_error
            return [await self._next_of(self._alone)]
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                self._room.set()
                if self._has_ended:
                    self._changed.set()  # an error, or the end, may wait after them
                return deltas
            if self._stop_error is not None:
                raise self._stop_error
            for task in self._tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
            if all(task.done() for task in self._tasks):
                raise StopAsyncIteration

    def stop(self, error: EpserveError) -> None:
        """Ends the run early: its reader gets `error`."""
        self._stop_error = error
        self._has_ended = True
        self._changed.set()
        if self._reader is not None:
            self._reader.cancel()

    def usage(self) -> Usage:
        """Cached tokens are those that the first choice of each prompt found."""
        first_of_prompt = self._choices[:: self._job.num_per_prompt]
        chat = self._job.chat
        reasoning_tokens = None
        if chat is not None and chat.marks is not None:
            reasoning_tokens = sum(choice.text.num_reasoning_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=sum(prompt.num_tokens for prompt in self._job.prompts),
            cached_tokens=sum(choice.call.num_cached_tokens for choice in first_of_prompt),
            completion_tokens=sum(choice.text.num_tokens for choice in self._choices),
            reasoning_tokens=reasoning_tokens,
            accepted_drafts=sum(choice.call.num_accepted_drafts for choice in self._choices),
            rejected_drafts=sum(choice.call.num_rejected_drafts for choice in self._choices),
        )

    def finish_reasons(self) -> list[str]:
        """Of each choice; one that was cut off has none, which is "error"."""
        return [choice.text.finish_reason or "error" for choice in self._choices]

    def returned(self) -> list[int]:
        """The choices to tell: for each prompt, those with the likeliest tokens, in order."""
        indices: list[int] = []
        num_tried, num_returned = self._job.num_per_prompt, self._job.num_returned
        for first in range(0, len(self._choices), num_tried):
            of_prompt = sorted(range(first, first + num_tried), key=self._surprise)
            indices += of_prompt if num_tried == num_returned else of_prompt[:num_returned]
        return sorted(indices) if num_tried == num_returned else indices

    def _surprise(self, index: int) -> float:
        """Mean negative log-probability of a choice's tokens."""
        text = self._choices[index].text
        return -text.sum_logprob / max(1, text.num_tokens)

    @property
    def is_over(self) -> bool:
        """Its only choice has ended: the pieces that were read last are the last there are.
        Several choices are read to the end of their tasks."""
        return self._alone is not None and self._choices[0].text.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(choice.text.num_tokens for choice in self._choices)

    @property
    def num_moves(self) -> int:
        return sum(choice.call.num_moves for choice in self._choices)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._has_ended = True
        self._changed.set()

    async def _next_of(
        self, alone: AsyncGenerator[tuple[int, ChoiceDelta]]
    ) -> tuple[int, ChoiceDelta]:
        """As `__anext__`."""
        reader = self._reader = asyncio.current_task()
        try:
            return await anext(alone)
        except asyncio.CancelledError:
            # By `stop`, and by nothing else at the same time?
            if self._stop_error is not None and reader is not None and not reader.uncancel():
                raise self._stop_error from None
            raise
        finally:
            self._reader = None

    async def _drive(self, choice: _Choice) -> None:
        """Reads one leg to its end, ahead of a reader that is slow by so many pieces at most."""
        async with aclosing(self._pieces_of(choice)) as deltas:
            async for delta in deltas:
                await self._room.wait()
                self._deltas.append(delta)
                self._changed.set()
                if len(self._deltas) >= MAX_DELTAS:
                    self._room.clear()

    async def _pieces_of(self, choice: _Choice) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
        """Reads one leg until the choice has ended: by the worker, or by a stop string."""
        last_at: float | None = None
        is_first = True
        async with aclosing(choice.call.batches()) as batches:
            async for batch in batches:
                if batch.tokens:
                    last_at = self._observe(choice, batch, last_at)
                delta = self._feed(choice, batch)
                if is_first and choice.echo is not None:
                    delta = choice.echo.before(delta, choice.call.prompt_logprobs)
                if is_first and self._job.tells_prompt_logprobs:
                    delta.prompt_logprobs = choice.call.prompt_logprobs
                is_first = False
                if delta:
                    yield choice.index, delta
                if choice.text.finish_reason is not None:
                    return

    def _feed(self, choice: _Choice, batch: TokenBatch) -> ChoiceDelta:
        num_before = choice.text.num_tokens
        delta = choice.text.feed(batch.tokens, batch.finish)
        if self._job.tells_token_ids:
            counted = batch.tokens[: choice.text.num_tokens - num_before]
            delta.token_ids = [token.token_id for token in counted]
        if batch.finish == FINISH_REASON_STOP and batch.tokens and delta.stop_reason is None:
            last = batch.tokens[-1].token_id
            delta.stop_reason = last if last in self._job.sampling.stop_token_ids else None
        return delta

    def _observe(self, choice: _Choice, batch: TokenBatch, last_at: float | None) -> float:
        now = self._clock.now()
        num_tokens = len(batch.tokens)
        self._metrics.output_tokens.inc(num_tokens)
        if last_at is None:
            for other in self._choices:
                other.call.note_begun()
            self._metrics.time_to_first_token.observe(now - self._job.arrived_at)
            self._metrics.queue_time.observe(choice.call.queue_seconds)
        else:
            self._metrics.observe_tokens(num_tokens, now - last_at)
        return now


def _make_choice(
    index: int, job: Job, cluster: Cluster, tokenizer: Tokenizer, hashes: bytes
) -> _Choice:
    prompt = job.prompts[index // job.num_per_prompt]
    sampling = SamplingParams()
    sampling.CopyFrom(job.sampling)
    sampling.max_tokens = prompt.max_tokens
    sampling.seed = choice_seed(job.sampling.seed, index % job.num_per_prompt)
    call = GenerateCall(
        cluster,
        request_id=choice_id(job.id, index),
        prompt=prompt,
        sampling=sampling,
        deadline=job.deadline,
        prefix_hashes=hashes,
        priority=job.priority,
    )
    return _Choice(index, call, _make_output(job, tokenizer, prompt.echo), prompt.echo)


def _make_output(
    job: Job, tokenizer: Tokenizer, echo: PromptEcho | None
) -> OutputText | ChatOutput:
    chat = job.chat
    shown = range(2**32) if job.shows_special else ()
    if chat is None:
        return OutputText(
            tokenizer,
            stops=job.stop_strings,
            min_tokens=job.sampling.min_tokens,
            logprobs=job.tells_logprobs,
            end_token_ids=job.end_token_ids,
            offset=echo.num_characters if echo else 0,
            shown=shown,
            includes_stop=job.includes_stop,
        )
    form = chat.tool_format
    parser = ToolCallParser(form, at_most_one=chat.at_most_one_call) if form else None
    return ChatOutput(
        tokenizer,
        marks=chat.marks,
        is_thinking=chat.is_thinking,
        tools=parser,
        stops=job.stop_strings,
        min_tokens=job.sampling.min_tokens,
        logprobs=job.tells_logprobs,
        end_token_ids=job.end_token_ids,
        shown=shown,
        includes_stop=job.includes_stop,
    )
