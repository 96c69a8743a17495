"""Body of POST /v1/completions."""

from typing import Annotated

from pydantic import Field

from core.errors import InvalidRequest
from gateway.sampling_fields import SamplingFields, is_text

DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(SamplingFields):
    """`prompt` is a text, token ids, or a list of several of either."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=5)

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
