"""Sampling parameters as a rank works with them. Torch-free."""

import msgspec

from proto import generate_pb2


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match. Meanings as in `generate.proto` `Grammar`."""

    lark: str
    after_token_id: int | None = None
    thoughts: tuple[int, int] | None = None  # ids that open and close them
    begins_with_token_id: int | None = None


class ThoughtBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Field meanings as in `generate.proto` `ThoughtBudget`."""

    max_tokens: int
    open_token_id: int
    close_token_ids: tuple[int, ...]  # of which the first is made to come
    is_open: bool


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Field meanings as in `generate.proto` `SamplingParams`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thought_budget: ThoughtBudget | None = None


def sampling_of(packed: bytes) -> Sampling:
    """`packed` is a serialized `SamplingParams`, checked by a front."""
    params = generate_pb2.SamplingParams.FromString(packed)
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=tuple((one.token_id, one.bias) for one in params.logit_bias),
        grammar=_grammar(params.grammar) if params.HasField("grammar") else None,
        prompt_logprobs=params.prompt_logprobs,
        top_prompt_logprobs=params.top_prompt_logprobs,
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in params.bad_words),
        thought_budget=_thought_budget(params.thought_budget)
        if params.HasField("thought_budget")
        else None,
    )


def _thought_budget(message: generate_pb2.ThoughtBudget) -> ThoughtBudget:
    also = (message.also_ends_at,) if message.HasField("also_ends_at") else ()
    return ThoughtBudget(
        max_tokens=message.max_tokens,
        open_token_id=message.open_token_id,
        close_token_ids=(message.close_token_id, *also),
        is_open=message.is_open,
    )


def _grammar(message: generate_pb2.Grammar) -> Grammar:
    return Grammar(
        lark=message.lark,
        after_token_id=message.after_token_id if message.HasField("after_token_id") else None,
        begins_with_token_id=message.begins_with_token_id
        if message.HasField("begins_with_token_id")
        else None,
        thoughts=(message.thoughts.open_token_id, message.thoughts.close_token_id)
        if message.HasField("thoughts")
        else None,
    )
