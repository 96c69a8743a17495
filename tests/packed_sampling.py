"""Sampling parameters as they travel: the inverse of `engine.sampling.sampling_params`."""

import msgspec

from engine.sampling.sampling_params import Sampling
from proto import generate_pb2


def params_of(sampling: Sampling) -> generate_pb2.SamplingParams:
    values = msgspec.structs.asdict(sampling)
    grammar, biases = values.pop("grammar"), values.pop("logit_bias")
    words, budget = values.pop("bad_words"), values.pop("thought_budget")
    params = generate_pb2.SamplingParams(**values)
    for word in words:
        params.bad_words.add(token_ids=word)
    if budget is not None:
        values = msgspec.structs.asdict(budget)
        close, *also = values.pop("close_token_ids")
        values |= {"close_token_id": close} | ({"also_ends_at": also[0]} if also else {})
        params.thought_budget.CopyFrom(generate_pb2.ThoughtBudget(**values))
    for token_id, bias in biases:
        params.logit_bias.add(token_id=token_id, bias=bias)
    if grammar is not None:
        values = {k: v for k, v in msgspec.structs.asdict(grammar).items() if v is not None}
        if grammar.thoughts is not None:
            opens, closes = grammar.thoughts
            values["thoughts"] = generate_pb2.Thoughts(open_token_id=opens, close_token_id=closes)
        params.grammar.CopyFrom(generate_pb2.Grammar(**values))
    return params


def packed(sampling: Sampling) -> bytes:
    return params_of(sampling).SerializeToString()
