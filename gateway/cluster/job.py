"""A validated request: what is to be generated, for how long, and how it is to be told."""

from typing import Literal

import msgspec

from core.errors import ContextLengthExceeded, InvalidRequest
from core.token_ids import num_ids, pack_ids
from gateway.formats.tool_format import ToolFormat
from gateway.prompt.prompt_echo import PromptEcho
from gateway.text.think_marks import ThinkMarks
from proto.generate_pb2 import SamplingParams

Endpoint = Literal["chat", "completions", "messages", "responses"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids (`core.token_ids`) and how many tokens may come after them; `echo` where they are
    to be told."""

    token_ids: bytes
    max_tokens: int
    echo: PromptEcho | None = None

    @property
    def num_tokens(self) -> int:
        return num_ids(self.token_ids)


class ChatForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the output of a chat is taken apart.

    `marks` None: thoughts are not looked for. `is_thinking`: the prompt has opened them.
    `tells_thoughts` false: they are counted but not shown. `tool_format` None: nor are calls
    looked for.
    """

    marks: ThinkMarks | None = None
    is_thinking: bool = False
    tells_thoughts: bool = True
    tool_format: ToolFormat | None = None
    at_most_one_call: bool = False


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of one request: choice i is sample i % n of prompt i // n.

    `created` is in unix seconds; `arrived_at` and `deadline` are on the gateway's clock. Of the
    `num_per_prompt` choices of a prompt the likeliest `num_returned` are told. `end_token_ids`
    end a choice without being shown, unless it `includes_stop`. `chat` is None for completions.
    """

    id: str
    endpoint: Endpoint
    created: int
    prompts: tuple[Prompt, ...]
    num_per_prompt: int
    num_returned: int
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    arrived_at: float
    deadline: float
    end_token_ids: frozenset[int]
    tells_logprobs: bool
    tells_token_ids: bool = False
    tells_prompt_logprobs: bool = False
    continuous_usage: bool = False
    includes_stop: bool = False
    shows_special: bool = False
    chat: ChatForm | None = None
    priority: int = 0

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
    if room < (1 if max_tokens != 0 else 0):
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
    return Prompt(
        token_ids=pack_ids(token_ids), max_tokens=room if wanted is None else min(wanted, room)
    )
