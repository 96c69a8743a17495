"""Refuses requests' token ids and sampling parameters that no worker can mean."""

import math
from collections.abc import Sequence

import numpy as np

from core.errors import InvalidRequest
from core.token_ids import unpack_ids
from engine.link.messages import MAX_TOP_LOGPROBS, MAX_TOP_PROMPT_LOGPROBS
from engine.server.grammar_check import check_grammar
from proto import generate_pb2

MAX_LOGIT_BIAS = 1024
MAX_ALLOWED, MAX_BAD_WORDS = 4096, 512
# What is divided by less may become infinite, and nothing can be drawn from infinities.
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 1e-3, 100


def check_sampling(params: generate_pb2.SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, naming the field, for values out of range and for tokens that the
    model does not know."""
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
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_bias(params.logit_bias, vocab_size)
    _check_words(params, vocab_size)
    if params.HasField("thought_budget"):
        budget = params.thought_budget
        marks = (budget.open_token_id, budget.close_token_id, budget.also_ends_at)
        _check_ids(marks, vocab_size, "thought_budget")
    if params.HasField("grammar"):
        check_grammar(params.grammar)
        grammar, thoughts = params.grammar, params.grammar.thoughts
        begins = (grammar.after_token_id, grammar.begins_with_token_id)
        named = (*begins, thoughts.open_token_id, thoughts.close_token_id)
        _check_ids(named, vocab_size, "grammar")


def check_token_ids(packed: bytes, vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for what are no ids, and for ids that the model does not know."""
    try:
        token_ids = unpack_ids(packed)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if packed:
        _check_ids((int(np.asarray(token_ids).max()),), vocab_size, param)


def _check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise InvalidRequest(
            f"token id {worst} is not below the model's vocabulary of {vocab_size}", param=param
        )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidRequest(f"{name} is {value:g}, not from {least:g} to {most:g}", param=name)


def _check_words(params: generate_pb2.SamplingParams, vocab_size: int) -> None:
    if len(params.allowed_token_ids) > MAX_ALLOWED or len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"at most {MAX_ALLOWED} allowed tokens and {MAX_BAD_WORDS} bad words are possible",
            param="allowed_token_ids" if params.allowed_token_ids else "bad_words",
        )
    _check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
    for word in params.bad_words:
        if not word.token_ids:
            raise InvalidRequest("a bad word is empty", param="bad_words")
        _check_ids(word.token_ids, vocab_size, "bad_words")


def _check_bias(biases: Sequence[generate_pb2.TokenBias], vocab_size: int) -> None:
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
    _check_ids(token_ids, vocab_size, "logit_bias")
