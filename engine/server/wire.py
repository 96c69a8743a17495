"""Tokens and KV targets between gRPC messages and those of the front-rank link."""

from collections.abc import Iterable

from engine.link.messages import KvTarget, PageRun, TokenOut
from proto import generate_pb2


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


def target_message(target: KvTarget) -> generate_pb2.KvTarget:
    return generate_pb2.KvTarget(
        agent=target.agent,
        runs=[generate_pb2.PageRun(first=run.first, count=run.count) for run in target.runs],
        kv_fingerprint=target.kv_fingerprint,
    )


def target_of(message: generate_pb2.KvTarget) -> KvTarget:
    return KvTarget(
        agent=message.agent,
        runs=tuple(PageRun(first=run.first, count=run.count) for run in message.runs),
        kv_fingerprint=message.kv_fingerprint,
    )
