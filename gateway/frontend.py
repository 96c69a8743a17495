"""From validated bodies to responses: prompts tokenized, bounds checked, a run made."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import Request, Response

from core.errors import InvalidRequest, ModelNotFound
from gateway.announcer import Announcer
from gateway.chat_reply import ChatReply
from gateway.chat_request import ChatRequest
from gateway.client import Cluster
from gateway.completion_reply import CompletionReply
from gateway.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.generation_response import GenerationResponse, Serving
from gateway.job import Job, Prompt, make_prompt
from gateway.request_body import read_body
from gateway.run import Run
from gateway.sampling_fields import SamplingFields
from gateway.served_model import ServedModel
from gateway.settings import GatewaySettings
from proto.generate_pb2 import SamplingParams

TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """Handles the two generation endpoints; everything it raises is an EpserveError that has
    cost no worker anything."""

    settings: GatewaySettings
    model: ServedModel
    cluster: Cluster
    announcer: Announcer
    serving: Serving

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at = self._admit()
        body = await read_body(request, ChatRequest)
        self._check_common(body)
        if self.model.chat_template is None:
            raise InvalidRequest(f"{self.model.name} has no chat template; use /v1/completions")
        text = self.model.chat_template.render(body.template_messages())
        token_ids = await self.model.tokenizer.encode(text, add_special_tokens=False)
        by_new_name = body.max_completion_tokens is not None
        prompt = make_prompt(
            token_ids,
            max_tokens=body.max_completion_tokens if by_new_name else body.max_tokens,
            default_max_tokens=None,
            max_model_len=self.max_model_len,
            prompt_param="messages",
            max_tokens_param="max_completion_tokens" if by_new_name else "max_tokens",
        )
        sampling = body.sampling_params(
            self.model.sampling_defaults,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        )
        job = self._job("chat", body, [prompt], sampling, arrived_at, request)
        return self._respond(job, ChatReply(job, self.model.name, self.model.tokenizer))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at = self._admit()
        body = await read_body(request, CompletionRequest)
        self._check_common(body)
        prompts = []
        for text_or_ids in body.prompts():
            prompts.append(
                make_prompt(
                    await self._token_ids(text_or_ids),
                    max_tokens=body.max_tokens,
                    default_max_tokens=DEFAULT_MAX_TOKENS,
                    max_model_len=self.max_model_len,
                    prompt_param="prompt",
                    max_tokens_param="max_tokens",
                )
            )
        sampling = body.sampling_params(
            self.model.sampling_defaults,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
        job = self._job("completions", body, prompts, sampling, arrived_at, request)
        return self._respond(job, CompletionReply(job, self.model.name, self.model.tokenizer))

    @property
    def max_model_len(self) -> int:
        """What the workers take, if any has said so, else what the model can; tokens."""
        return self.announcer.max_model_len or self.model.max_position

    def _admit(self) -> float:
        """The time of arrival, if there is room: a full gateway does not even read bodies."""
        self.serving.admission.check()
        return self.serving.clock.now()

    def _check_common(self, body: SamplingFields) -> None:
        if body.model != self.model.name:
            raise ModelNotFound(f"The model {body.model!r} does not exist.")
        body.check_token_ids(self.model.vocab_size)

    async def _token_ids(self, text_or_ids: str | list[int]) -> list[int]:
        if isinstance(text_or_ids, str):
            return await self.model.tokenizer.encode(text_or_ids, add_special_tokens=True)
        if max(text_or_ids) >= self.model.vocab_size:
            raise InvalidRequest(
                f"prompt: token ids must be below the vocabulary's size, {self.model.vocab_size}",
                param="prompt",
            )
        return text_or_ids

    def _job(
        self,
        endpoint: Literal["chat", "completions"],
        body: SamplingFields,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        arrived_at: float,
        request: Request,
    ) -> Job:
        num_per_prompt = body.n or 1
        if len(prompts) * num_per_prompt > self.settings.max_choices:
            raise InvalidRequest(
                f"at most {self.settings.max_choices} choices in a request, over all prompts",
                param="n" if num_per_prompt > 1 else "prompt",
            )
        if any(sampling.min_tokens > prompt.max_tokens for prompt in prompts):
            raise InvalidRequest(
                "min_tokens is more than the tokens that may be generated", param="min_tokens"
            )
        prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
        return Job(
            id=f"{prefix}-{secrets.token_hex(12)}",
            endpoint=endpoint,
            created=int(time.time()),
            prompts=tuple(prompts),
            num_per_prompt=num_per_prompt,
            sampling=sampling,
            stop_strings=body.stop_strings,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            arrived_at=arrived_at,
            deadline=arrived_at + self._timeout_seconds(request),
        )

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

    def _respond(self, job: Job, reply: ChatReply | CompletionReply) -> Response:
        self.cluster.metrics.prompt_tokens.inc(sum(len(one.token_ids) for one in job.prompts))
        page_tokens = self.announcer.page_tokens
        run = Run(job, self.cluster, self.model.tokenizer, page_tokens=page_tokens)
        return GenerationResponse(job, run, reply, self.serving)
