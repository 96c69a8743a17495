"""A validated request: what is to be generated, for how long, and how it is to be told."""

from dataclasses import dataclass
from typing import Literal

from core.errors import ContextLengthExceeded, InvalidRequest
from proto.generate_pb2 import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids and how many tokens may come behind them."""

    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All choices of one request: choice i is sample i % n of prompt i // n.

    `created` is in unix seconds; `arrived_at` and `deadline` are on the gateway's clock.
    """

    id: str
    endpoint: Literal["chat", "completions"]
    created: int
    prompts: tuple[Prompt, ...]
    num_per_prompt: int
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    arrived_at: float
    deadline: float

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_per_prompt


def make_prompt(
    token_ids: list[int],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    max_model_len: int,
    prompt_param: str,
    max_tokens_param: str,
) -> Prompt:
    """`max_tokens` is what the client asked for; when it did not, `default_max_tokens` (None: up
    to the end of the model's context) or as many of them as fit.

    Raises ContextLengthExceeded when prompt, or prompt and `max_tokens`, do not fit, and
    InvalidRequest when there is no prompt.
    """
    if not token_ids:
        raise InvalidRequest(f"{prompt_param} must not be empty", param=prompt_param)
    room = max_model_len - len(token_ids)
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if room < 1:
        raise ContextLengthExceeded(
            f"{limit} However, your prompt has {len(token_ids)} tokens and must leave room for "
            "at least one more.",
            param=prompt_param,
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"{limit} However, you requested {len(token_ids) + max_tokens} tokens "
            f"({len(token_ids)} in the prompt, {max_tokens} for the completion).",
            param=max_tokens_param,
        )
    wanted = default_max_tokens if max_tokens is None else max_tokens
    return Prompt(token_ids=token_ids, max_tokens=room if wanted is None else min(wanted, room))
