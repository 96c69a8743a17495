"""The fields that chat and text completions share, and what they mean for a worker."""

import os
from typing import Annotated, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from core.errors import InvalidRequest
from gateway.base.sampling_defaults import SamplingDefaults
from gateway.requests.constraint_fields import ConstraintFields
from gateway.requests.request_body import WHOLE_BODY, ClosedModel, Items
from proto.generate_pb2 import SamplingParams, TokenBias

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 128
MAX_PROMPT_LOGPROBS = 20
PRIORITIES = 2**31
UINT64 = 2**64
# Smaller ones become 0 on their way to a worker, in float32, and 0 means all tokens.
LEAST_TOP_P = 2.0**-126

# JSON's keys are texts.
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(ClosedModel):
    """Nothing is obfuscated here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(ConstraintFields):
    """Names, ranges and defaults are OpenAI's, of what its API has; the others are those that
    vLLM and SGLang have."""

    model_config = WHOLE_BODY

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=10)
    logit_bias: dict[TokenIdText, Bias] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=UINT64)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = Field(
        None, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Items[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    bad_words: Items[StopString] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_LOGPROBS)
    return_token_ids: bool | None = None
    n: int | None = Field(None, ge=1)
    priority: int | None = Field(None, ge=-PRIORITIES, lt=PRIORITIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_num_biases(cls, value: object) -> object:
        """Before any of them is looked at, and complained about."""
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} tokens can be named")
        return value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _check_spellings(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and len(set(map(int, value))) < len(value):
            raise ValueError("a token is named twice, in different spellings")
        return value

    @field_validator("model", "stop", "bad_words", mode="after")
    @classmethod
    def _check_text(cls, value: object) -> object:
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and not is_text(text):
                raise ValueError("not valid Unicode")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop = self.stop
        if stop is None:
            return ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def num_tried(self) -> int:
        """Choices generated for each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    def sampling_params(
        self, defaults: SamplingDefaults, *, logprobs: bool, top_logprobs: int
    ) -> SamplingParams:
        """Everything but max_tokens, which depends on the prompt. The seed is that of the
        first choice, drawn at random when the client names none."""
        seed = _random_seed() if self.seed is None else self.seed % UINT64
        top_k = defaults.top_k if self.top_k is None else self.top_k
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            top_k=max(0, top_k),
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=seed,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=[
                TokenBias(token_id=token_id, bias=bias) for token_id, bias in self._biases().items()
            ],
            allowed_token_ids=self.allowed_token_ids or (),
            prompt_logprobs=self.prompt_logprobs is not None,
            top_prompt_logprobs=self.prompt_logprobs or 0,
        )

    def _biases(self) -> dict[int, float]:
        """In the order of the ids, so that equal requests are equal to the byte."""
        if not self.logit_bias:
            return {}
        biases = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        return dict(sorted(biases.items()))

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequest for tokens that the model does not have."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self._biases(),
        }
        for param, token_ids in named.items():
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidRequest(
                    f"{param}: token ids must be below the vocabulary's size, {vocab_size}",
                    param=param,
                )


def _random_seed() -> int:
    """63 bits."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def is_text(text: str) -> bool:
    """Whether `text` has a UTF-8 form: JSON can spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` (of n) of a prompt: the request's own for the first one, an
    unrelated one (splitmix64) for the others; prompts of one request do not differ in it."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) % UINT64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % UINT64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % UINT64
    return mixed ^ (mixed >> 31)
