"""From a GenerateRequest to what the rank is told, or the reason why not."""

import math
from collections.abc import Sequence

from core.errors import ContextLengthExceeded, InvalidRequest
from decode_worker.plan import pages_for
from engine.messages import Ready, Sampling, Submit
from proto import generate_pb2

MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 100


def submit_of(request: generate_pb2.GenerateRequest, key: str, ready: Ready) -> Submit:
    """`key` names the request on this worker. Raises InvalidRequest naming the field, and
    ContextLengthExceeded for what could never fit into the context or the KV pool."""
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt_token_ids")
    _check_ids("prompt_token_ids", prompt, ready.vocab_size)
    _check_ids("output_token_ids", output, ready.vocab_size)
    sampling = _sampling(request.sampling, ready)
    if len(output) >= sampling.max_tokens:
        raise InvalidRequest(
            f"{len(output)} output tokens leave nothing of max_tokens {sampling.max_tokens}",
            param="output_token_ids",
        )
    _check_room(len(prompt), sampling.max_tokens, ready)
    return Submit(
        request_id=key,
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
    )


def _sampling(params: generate_pb2.SamplingParams, ready: Ready) -> Sampling:
    _check("temperature", math.isfinite(params.temperature) and params.temperature >= 0)
    _check("top_p", 0 <= params.top_p <= 1)
    _check("min_p", 0 <= params.min_p <= 1)
    _check("max_tokens", params.max_tokens >= 1)
    _check("min_tokens", params.min_tokens <= params.max_tokens)
    _check("stop_token_ids", len(params.stop_token_ids) <= MAX_STOP_TOKEN_IDS)
    _check("top_logprobs", params.top_logprobs <= min(MAX_TOP_LOGPROBS, ready.vocab_size))
    _check_ids("stop_token_ids", params.stop_token_ids, ready.vocab_size)
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
    )


def _check_room(num_prompt_tokens: int, max_tokens: int, ready: Ready) -> None:
    total = num_prompt_tokens + max_tokens
    wanted = f"prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens}"
    if total > ready.max_model_len:
        raise ContextLengthExceeded(
            f"{wanted} exceed the context of {ready.max_model_len} tokens", param="max_tokens"
        )
    # The last token is never fed back: it needs no KV.
    if pages_for(total - 1, ready.page_tokens) > ready.pages_total:
        most = ready.pages_total * ready.page_tokens
        raise ContextLengthExceeded(
            f"{wanted} exceed the {most} tokens of KV that a rank holds", param="max_tokens"
        )


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"{name} holds {max(token_ids)}, the vocabulary ends at {vocab_size - 1}", param=name
        )


def _check(name: str, valid: bool) -> None:
    if not valid:
        raise InvalidRequest(f"{name} is out of range", param=name)
