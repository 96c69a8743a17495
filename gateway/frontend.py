"""From validated bodies to responses: prompts tokenized, bounds checked, a run made."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from core import tracing
from core.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from core.log import get_logger
from core.token_ids import unpack_ids
from gateway.base.settings import GatewaySettings
from gateway.cluster.client import Cluster
from gateway.cluster.job import ChatForm, Endpoint, Job, Prompt, make_prompt
from gateway.cluster.run import RequestRun
from gateway.generation_response import GenerationResponse, Serving
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.grammar_request import needs_grammar, request_grammar
from gateway.http.request_trace import describe_job
from gateway.limits.api_keys import EVERYBODY, Client
from gateway.limits.key_guard import CLIENT
from gateway.prompt.chat_prompt import make_chat_prompt
from gateway.prompt.prompt_echo import PromptEcho
from gateway.prompt.served_model import ServedModel
from gateway.replies.chat_reply import ChatReply
from gateway.replies.completion_reply import CompletionReply
from gateway.replies.reply_form import ReplyForm
from gateway.replies.tokenize_reply import detokenize_reply, tokenize_reply
from gateway.requests.chat_request import ChatRequest
from gateway.requests.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.requests.request_body import aside, read_body
from gateway.requests.sampling_fields import SamplingFields
from gateway.requests.tokenize_request import DetokenizeRequest, TokenizeRequest
from gateway.requests.tool_fields import ToolUse
from gateway.responses_api.response_store import ResponseStore
from gateway.router_heartbeat import RouterHeartbeat
from proto.generate_pb2 import SamplingParams

log = get_logger("gateway.frontend")

TIMEOUT_HEADER = "x-request-timeout"
ID_PREFIXES: dict[Endpoint, str] = {
    "chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """Handles the endpoints that take a prompt; everything it raises is an EpserveError that has
    cost no worker anything."""

    settings: GatewaySettings
    model: ServedModel
    cluster: Cluster
    heartbeat: RouterHeartbeat
    serving: Serving
    grammars: GrammarCompiler
    responses: ResponseStore

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at = self.admit()
        body = await read_body(request, ChatRequest)

        def reply(job: Job) -> ReplyForm:
            return ChatReply(job, self.model.name, self.model.tokenizer)

        return await self.answer(body, request, arrived_at, "chat", reply)

    async def answer(
        self,
        body: ChatRequest,
        request: Request,
        arrived_at: float,
        endpoint: Endpoint,
        make_reply: Callable[[Job], ReplyForm],
        *,
        default_max_tokens: int | None = None,
    ) -> Response:
        """What all endpoints come to whose body is a chat; `default_max_tokens` as in
        `make_prompt`."""
        self._check_common(body, request)
        self._check_num_choices(body, 1)
        tools = body.tool_use()
        with tracing.begin("tokenize") as span:
            rendered = await make_chat_prompt(body, self.model, num_bytes=len(await request.body()))
            _note_tokens(span, len(rendered.token_ids))
        by_new_name = body.max_completion_tokens is not None
        prompt = make_prompt(
            rendered.token_ids,
            max_tokens=body.max_completion_tokens if by_new_name else body.max_tokens,
            default_max_tokens=default_max_tokens,
            max_model_len=self.max_model_len,
            prompt_param="messages",
            max_tokens_param="max_completion_tokens" if by_new_name else "max_tokens",
        )
        sampling = body.sampling_params(
            self.model.sampling_defaults,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        )
        marks = self.model.think_marks
        if marks is not None and not tools.offered:
            marks = marks._replace(also_ends_at=None)  # no call can end thoughts
        deadline = arrived_at + self._timeout_seconds(request)
        await self._add_rules(request, sampling, body, tools, deadline)
        if marks is not None and sampling.HasField("grammar"):
            rendered.let_think_first(sampling.grammar, marks)
        rendered.bound_thoughts(sampling, body, marks)
        form = ChatForm(
            marks=marks if body.separate_reasoning is not False else None,
            is_thinking=rendered.is_thinking,
            tells_thoughts=body.include_reasoning is not False,
            tool_format=self.model.tool_format if tools.offered else None,
            at_most_one_call=tools.at_most_one,
        )
        job = self._job(
            body, [prompt], sampling, arrived_at, deadline,
            endpoint=endpoint, tells_logprobs=sampling.logprobs, chat=form,
        )  # fmt: skip
        if tools.forced:  # there is no text in which stop strings could count
            job = msgspec.structs.replace(job, stop_strings=())
        describe_job(request.scope, job, self.model.name)
        return self._respond(job, make_reply(job))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at = self.admit()
        body = await read_body(request, CompletionRequest)
        self._check_common(body, request)
        texts_or_ids = body.prompts()
        self._check_num_choices(body, len(texts_or_ids))
        with tracing.begin("tokenize") as span:
            prompts = [await self._prompt(body, text_or_ids) for text_or_ids in texts_or_ids]
            _note_tokens(span, *(prompt.num_tokens for prompt in prompts))
        tells_logprobs = body.logprobs is not None
        sampling = body.sampling_params(
            self.model.sampling_defaults,
            # The best are found by them.
            logprobs=tells_logprobs or body.num_tried > (body.n or 1),
            top_logprobs=body.logprobs or 0,
        )
        # Without tokens to generate, only the prompt's own log-probabilities are work.
        if body.echo and (tells_logprobs or body.max_tokens == 0):
            sampling.prompt_logprobs = True
            sampling.top_prompt_logprobs = body.logprobs or 0
        deadline = arrived_at + self._timeout_seconds(request)
        await self._add_rules(request, sampling, body, None, deadline)
        job = self._job(
            body, prompts, sampling, arrived_at, deadline,
            endpoint="completions", tells_logprobs=tells_logprobs,
        )  # fmt: skip
        describe_job(request.scope, job, self.model.name)
        return self._respond(job, CompletionReply(job, self.model.name, self.model.tokenizer))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await read_body(request, TokenizeRequest)
        self.check_model(body.model)
        if body.messages is not None:
            size = len(await request.body())
            rendered = await make_chat_prompt(body.chat(), self.model, num_bytes=size)
            token_ids = rendered.token_ids
        else:
            token_ids = await self.model.tokenizer.encode(
                body.text, add_special_tokens=body.add_special_tokens is not False
            )
        return tokenize_reply(
            token_ids,
            self.model.tokenizer,
            max_model_len=self.max_model_len,
            with_texts=bool(body.return_token_strs),
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read_body(request, DetokenizeRequest)
        self.check_model(body.model)
        if any(token_id >= self.model.vocab_size for token_id in body.tokens):
            raise InvalidRequest(
                f"tokens must be below the vocabulary's size, {self.model.vocab_size}",
                param="tokens",
            )
        return detokenize_reply(body.tokens, self.model.tokenizer)

    @property
    def max_model_len(self) -> int:
        """What the workers take, if any has said so, else what the model can; tokens."""
        return self.heartbeat.max_model_len or self.model.max_position

    def admit(self) -> float:
        """The time of arrival, if there is room: a full gateway does not even read bodies."""
        self.serving.admission.check()
        return self.serving.clock.now()

    def _check_common(self, body: SamplingFields, request: Request) -> None:
        self.check_model(body.model)
        _check_priority(body.priority or 0, request.scope.get(CLIENT))
        body.check_token_ids(self.model.vocab_size)

    def _check_num_choices(self, body: SamplingFields, num_prompts: int) -> None:
        """Before anything is done for each prompt."""
        if num_prompts * body.num_tried > self.settings.max_choices:
            raise InvalidRequest(
                f"at most {self.settings.max_choices} choices in a request, over all prompts",
                param=_blamed_for_choices(body),
            )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise ModelNotFound(f"The model {name!r} does not exist.")

    async def _add_rules(
        self,
        request: Request,
        sampling: SamplingParams,
        body: SamplingFields,
        tools: ToolUse | None,
        deadline: float,
    ) -> None:
        """What the output may be. Raises as `_add_grammar`."""
        for word in body.bad_words or ():
            # At the begin of a text, and within.
            for text in dict.fromkeys((word, " " + word.lstrip())):
                ids = await self.model.tokenizer.encode(text, add_special_tokens=False)
                sampling.bad_words.add(token_ids=ids)
        await self._add_grammar(request, sampling, body, tools, deadline)
        if body.allowed_token_ids and sampling.HasField("grammar"):
            raise InvalidRequest(
                "allowed_token_ids cannot be kept to beside a form of the output",
                param="allowed_token_ids",
            )

    async def _add_grammar(
        self,
        request: Request,
        sampling: SamplingParams,
        body: SamplingFields,
        tools: ToolUse | None,
        deadline: float,
    ) -> None:
        """Raises InvalidRequest for a form that cannot be kept to, and DeadlineExceeded where
        others' take too long."""
        size = len(await request.body())
        constraint = await aside(size, body.constraint)
        if not needs_grammar(constraint, tools):
            return
        with tracing.begin("compile grammar"):
            try:
                async with asyncio.timeout(deadline - self.serving.clock.now()):
                    grammar = await request_grammar(
                        constraint,
                        tools,
                        self.model.tool_format,
                        self.grammars,
                        client=_client_name(request),
                    )
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed before the grammar") from error
        sampling.grammar.CopyFrom(grammar)

    async def _prompt(self, body: CompletionRequest, text_or_ids: str | list[int]) -> Prompt:
        adds_special = body.add_special_tokens is not False
        token_ids = await self._token_ids(text_or_ids, adds_special=adds_special)
        prompt = make_prompt(
            token_ids,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            max_model_len=self.max_model_len,
            prompt_param="prompt",
            max_tokens_param="max_tokens",
        )
        if not body.echo:
            return prompt
        text = text_or_ids if isinstance(text_or_ids, str) else None
        return msgspec.structs.replace(
            prompt, echo=PromptEcho(self.model.tokenizer, token_ids, text)
        )

    async def _token_ids(self, text_or_ids: str | list[int], *, adds_special: bool) -> list[int]:
        if isinstance(text_or_ids, str):
            return await self.model.tokenizer.encode(text_or_ids, add_special_tokens=adds_special)
        if max(text_or_ids) >= self.model.vocab_size:
            raise InvalidRequest(
                f"prompt: token ids must be below the vocabulary's size, {self.model.vocab_size}",
                param="prompt",
            )
        return text_or_ids

    def _job(
        self,
        body: SamplingFields,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        arrived_at: float,
        deadline: float,
        *,
        endpoint: Endpoint,
        tells_logprobs: bool,
        chat: ChatForm | None = None,
    ) -> Job:
        num_returned = body.n or 1
        min_tokens = sampling.min_tokens
        if min_tokens and any(min_tokens > prompt.max_tokens for prompt in prompts):
            raise InvalidRequest(
                "min_tokens is more than the tokens that may be generated", param="min_tokens"
            )
        return Job(
            id=ID_PREFIXES[endpoint] + os.urandom(12).hex(),
            endpoint=endpoint,
            created=int(time.time()),
            prompts=tuple(prompts),
            num_per_prompt=body.num_tried,
            num_returned=num_returned,
            sampling=sampling,
            stop_strings=body.stop_strings,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            arrived_at=arrived_at,
            deadline=deadline,
            end_token_ids=self._end_token_ids(sampling),
            tells_logprobs=tells_logprobs,
            tells_token_ids=bool(body.return_token_ids),
            tells_prompt_logprobs=body.prompt_logprobs is not None,
            continuous_usage=body.continuous_usage,
            includes_stop=bool(body.include_stop_str_in_output),
            shows_special=body.skip_special_tokens is False,
            chat=chat,
            priority=body.priority or 0,
        )

    def _end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos_token_ids = () if sampling.ignore_eos else self.model.eos_token_ids
        return frozenset((*eos_token_ids, *sampling.stop_token_ids))

    def _timeout_seconds(self, request: Request) -> float:
        """The settings' bound, or less when the client says so. Raises InvalidRequest."""
        longest = self.settings.request_timeout_seconds
        text = request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return longest
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a positive number of seconds", param=TIMEOUT_HEADER
            )
        return min(seconds, longest)

    def _respond(self, job: Job, reply: ReplyForm) -> Response:
        metrics = self.cluster.metrics
        metrics.prompt_tokens.inc(sum(one.num_tokens for one in job.prompts))
        metrics.prepare_time.observe(self.serving.clock.now() - job.arrived_at)
        if self.settings.log_prompts:
            texts = [
                self.model.tokenizer.spelled_text(unpack_ids(one.token_ids)) for one in job.prompts
            ]
            log.info("prompts", id=job.id, texts=texts)
        page_tokens = self.heartbeat.page_tokens
        run = RequestRun(job, self.cluster, self.model.tokenizer, page_tokens=page_tokens)
        return GenerationResponse(job, run, reply, self.serving)


def _check_priority(priority: int, client: Client | None) -> None:
    if client is not None and client.max_priority is not None and priority > client.max_priority:
        raise InvalidRequest(
            f"priority: this key may have at most {client.max_priority}; the gateway's operator "
            "can allow more with --max-priority, or with max_priority=N after the key",
            param="priority",
        )


def _client_name(request: Request) -> str:
    """The name of the key; where there are no keys, the address."""
    client: Client | None = request.scope.get(CLIENT)
    if client is not None and client.name != EVERYBODY:
        return f"key {client.name}"
    return request.client.host if request.client is not None else ""


def _note_tokens(span: tracing.Span, *nums_tokens: int) -> None:
    if span.is_recording:
        span.note({"epserve.num_prompt_tokens": sum(nums_tokens)})


def _blamed_for_choices(body: SamplingFields) -> str:
    if body.num_tried > (body.n or 1):
        return "best_of"
    return "n" if body.num_tried > 1 else "prompt"
