"""Between gRPC messages and those of the front-rank link; refuses what no worker can mean."""

import math

from core.errors import InvalidRequest
from engine.messages import MAX_TOP_LOGPROBS, Run, Sampling, Sink, TokenOut
from proto import generate_pb2


def sampling_of(params: generate_pb2.SamplingParams) -> Sampling:
    """Raises InvalidRequest, naming the field, for values out of range."""
    ranges = {
        "temperature": (params.temperature, math.inf),
        "top_p": (params.top_p, 1.0),
        "min_p": (params.min_p, 1.0),
        "top_logprobs": (params.top_logprobs, MAX_TOP_LOGPROBS),
    }
    for name, (value, most) in ranges.items():
        if not (math.isfinite(value) and 0 <= value <= most):
            raise InvalidRequest(f"{name} is {value:g}, not from 0 to {most:g}", param=name)
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
    )


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
        runs=tuple(Run(first=run.first, count=run.count) for run in message.runs),
        kv_fingerprint=message.kv_fingerprint,
    )
