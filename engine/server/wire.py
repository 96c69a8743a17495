"""Between gRPC messages and those of the front-rank link; refuses what no worker can mean."""

import math
from collections.abc import Iterable

from core.errors import InvalidRequest
from engine.link.messages import (
    MAX_TOP_LOGPROBS,
    MAX_TOP_PROMPT_LOGPROBS,
    PageRun,
    Sampling,
    Sink,
    TokenOut,
)
from engine.server.grammar_wire import grammar_message, grammar_of
from proto import generate_pb2

MAX_LOGIT_BIAS = 1024
# What is divided by less may become infinite, and nothing can be drawn from infinities.
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 1e-3, 100


def sampling_of(params: generate_pb2.SamplingParams) -> Sampling:
    """Raises InvalidRequest, naming the field, for values out of range."""
    _check_range("temperature", params.temperature, 0, math.inf)
    _check_range("top_p", params.top_p, 0, 1)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("top_logprobs", params.top_logprobs, 0, MAX_TOP_LOGPROBS)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range(
        "repetition_penalty",
        params.repetition_penalty or 1.0,
        LEAST_REPETITION_PENALTY,
        MOST_REPETITION_PENALTY,
    )
    _check_range("top_prompt_logprobs", params.top_prompt_logprobs, 0, MAX_TOP_PROMPT_LOGPROBS)
    _check_bias(params.logit_bias)
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
        grammar=grammar_of(params.grammar) if params.HasField("grammar") else None,
        prompt_logprobs=params.prompt_logprobs,
        top_prompt_logprobs=params.top_prompt_logprobs,
    )


def sampling_message(sampling: Sampling) -> generate_pb2.SamplingParams:
    """The inverse of `sampling_of`."""
    return generate_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[
            generate_pb2.TokenBias(token_id=token_id, bias=bias)
            for token_id, bias in sampling.logit_bias
        ],
        grammar=None if sampling.grammar is None else grammar_message(sampling.grammar),
        prompt_logprobs=sampling.prompt_logprobs,
        top_prompt_logprobs=sampling.top_prompt_logprobs,
    )


def check_sampled_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequest for parameters that name tokens which the model does not know."""
    check_token_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(tuple(one for one, _ in sampling.logit_bias), vocab_size, "logit_bias")
    if sampling.grammar is not None and sampling.grammar.after_token_id is not None:
        check_token_ids((sampling.grammar.after_token_id,), vocab_size, "grammar")


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for ids that the model does not know."""
    if token_ids and max(token_ids) >= vocab_size:
        worst = max(token_ids)
        raise InvalidRequest(
            f"token id {worst} is not below the model's vocabulary of {vocab_size}", param=param
        )


def token_message(token: TokenOut) -> generate_pb2.Token:
    return generate_pb2.Token(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[
            generate_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in token.top
        ],
    )


def prompt_messages(tokens: Iterable[TokenOut]) -> list[generate_pb2.Token]:
    """Log-probabilities of a whole prompt; nothing says how likely its first token is."""
    messages = [token_message(token) for token in tokens]
    for message in messages[1:]:
        message.has_logprob = True
    return messages


def token_of(message: generate_pb2.Token) -> TokenOut:
    return TokenOut(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def sink_message(sink: Sink) -> generate_pb2.KvSink:
    return generate_pb2.KvSink(
        agent=sink.agent,
        runs=[generate_pb2.PageRun(first=run.first, count=run.count) for run in sink.runs],
        kv_fingerprint=sink.kv_fingerprint,
    )


def sink_of(message: generate_pb2.KvSink) -> Sink:
    return Sink(
        agent=message.agent,
        runs=tuple(PageRun(first=run.first, count=run.count) for run in message.runs),
        kv_fingerprint=message.kv_fingerprint,
    )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidRequest(f"{name} is {value:g}, not from {least:g} to {most:g}", param=name)


def _check_bias(biases: Iterable[generate_pb2.TokenBias]) -> None:
    token_ids = [one.token_id for one in biases]
    if len(token_ids) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias names {len(token_ids)} tokens, at most {MAX_LOGIT_BIAS} are possible",
            param="logit_bias",
        )
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequest("logit_bias names a token twice", param="logit_bias")
    for one in biases:
        _check_range("logit_bias", one.bias, -100, 100)
