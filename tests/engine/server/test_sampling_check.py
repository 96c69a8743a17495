"""Sampling parameters and token ids: the same on the other side, or refused by name."""

from contextlib import nullcontext

import msgspec
import pytest
from google.protobuf.text_format import Parse

from core.errors import InvalidRequest
from core.token_ids import pack_ids
from engine.sampling.sampling_params import Grammar, Sampling, ThoughtBudget, sampling_of
from engine.server.grammar_check import MAX_GRAMMAR_BYTES, MAX_LINES
from engine.server.sampling_check import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    check_sampling,
    check_token_ids,
)
from proto.generate_pb2 import SamplingParams
from tests.packed_sampling import packed, params_of

VOCAB_SIZE = 2000

FULL = Sampling(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    seed=2**63,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=(4, 5),
    ignore_eos=True,
    logprobs=True,
    top_logprobs=3,
    frequency_penalty=-1.5,
    presence_penalty=2.0,
    repetition_penalty=1.25,
    logit_bias=((3, -100.0), (9, 0.5)),
    prompt_logprobs=True,
    top_prompt_logprobs=4,
    allowed_token_ids=(3, 9),
    bad_words=((7,), (8, 7, 9)),
    thought_budget=ThoughtBudget(
        max_tokens=5, open_token_id=8, close_token_ids=(9, 3), is_open=True
    ),
)


@pytest.mark.parametrize(
    "grammar",
    [
        None,
        Grammar(lark="start: /a/"),
        Grammar(lark="start: /a/", after_token_id=0),
        Grammar(lark="start: /a/", thoughts=(3, 0), begins_with_token_id=0),
    ],
)
def test_parameters_come_through(grammar: Grammar | None) -> None:
    sampling = msgspec.structs.replace(FULL, grammar=grammar)
    check_sampling(params_of(sampling), VOCAB_SIZE)
    assert sampling_of(packed(sampling)) == sampling


def test_absent_fields_change_nothing() -> None:
    check_sampling(SamplingParams(), VOCAB_SIZE)
    assert sampling_of(b"") == Sampling(max_tokens=0)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("frequency_penalty: 2.1", "frequency_penalty"),
        ("presence_penalty: nan", "presence_penalty"),
        ("repetition_penalty: -1", "repetition_penalty"),
        ("repetition_penalty: inf", "repetition_penalty"),
        ("repetition_penalty: 1e-38", "repetition_penalty"),  # logits would be infinite
        ("top_prompt_logprobs: 21", "top_prompt_logprobs"),
        ("logit_bias {token_id: 1 bias: 100.5}", "logit_bias"),
        ("logit_bias {token_id: 1 bias: nan}", "logit_bias"),
        ("logit_bias {token_id: 1} logit_bias {token_id: 1}", "logit_bias"),
        ("logit_bias {}" * (MAX_LOGIT_BIAS + 1), "logit_bias"),
        ("bad_words {}", "bad_words"),
        ("bad_words {token_ids: 1}" * (MAX_BAD_WORDS + 1), "bad_words"),
        ("allowed_token_ids: 1 " * (MAX_ALLOWED + 1), "allowed_token_ids"),
        ("grammar {}", "grammar"),
        (f'grammar {{lark: "{"a" * (MAX_GRAMMAR_BYTES + 1)}"}}', "grammar"),
        ('grammar {lark: "' + r"\n" * (MAX_LINES + 1) + '"}', "grammar"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(Parse(text, SamplingParams()), VOCAB_SIZE)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(stop_token_ids=(10,)),
        Sampling(logit_bias=((3, 1.0), (10, 1.0))),
        Sampling(allowed_token_ids=(3, 10)),
        Sampling(bad_words=((3,), (3, 10))),
        Sampling(
            thought_budget=ThoughtBudget(
                max_tokens=0, open_token_id=3, close_token_ids=(4, 10), is_open=False
            )
        ),
        Sampling(grammar=Grammar(lark="start: /a/", after_token_id=10)),
        Sampling(grammar=Grammar(lark="start: /a/", begins_with_token_id=10)),
        Sampling(grammar=Grammar(lark="start: /a/", thoughts=(10, 0))),
        Sampling(grammar=Grammar(lark="start: /a/", thoughts=(0, 10))),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(sampling: Sampling) -> None:
    check_sampling(params_of(sampling), vocab_size=11)
    with pytest.raises(InvalidRequest):
        check_sampling(params_of(sampling), vocab_size=10)


@pytest.mark.parametrize(
    ("packed_ids", "is_right"),
    [(b"", True), (pack_ids([0, 10, 3]), True), (pack_ids([0, 11, 3]), False), (b"abcde", False)],
)
def test_token_ids_are_whole_and_known_to_the_model(packed_ids: bytes, is_right: bool) -> None:
    with nullcontext() if is_right else pytest.raises(InvalidRequest) as caught:
        check_token_ids(packed_ids, 11, "token_ids")
    assert is_right or caught.value.param == "token_ids"
