"""Body of POST /v1/completions."""

from typing import Self

from pydantic import Field, model_validator

from core.errors import InvalidRequest
from gateway.requests.request_body import Items
from gateway.requests.sampling_fields import SamplingFields, TokenId, is_text

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """`prompt` is a text, token ids, or a list of several of either."""

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens may be 0 only when echo is true", param="max_tokens")
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs: with echo, logprobs tells them", param="prompt_logprobs"
            )
        num_returned = self.n or 1
        if self.best_of is not None and self.best_of < num_returned:
            raise InvalidRequest("best_of must not be less than n", param="best_of")
        if self.stream and self.num_tried > num_returned:
            raise InvalidRequest("best_of cannot be streamed", param="best_of")
        return self

    @property
    def num_tried(self) -> int:
        """Choices generated for each prompt, of which the best n are returned."""
        return max(self.n or 1, self.best_of or 1)

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. Raises InvalidRequest for empty ones."""
        prompt = self.prompt
        prompts: list[str | list[int]]
        if isinstance(prompt, str):
            prompts = [prompt]
        elif prompt and isinstance(prompt[0], int):
            prompts = [[token for token in prompt if isinstance(token, int)]]
        else:
            prompts = [one for one in prompt if not isinstance(one, int)]
        if not prompts or not all(prompts):
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if not all(is_text(one) for one in prompts if isinstance(one, str)):
            raise InvalidRequest("prompt is not valid Unicode", param="prompt")
        return prompts
