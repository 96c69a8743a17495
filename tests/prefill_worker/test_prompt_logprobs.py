"""Log-probabilities of prompts against transformers, and first tokens under rules."""

import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from core.token_ids import unpack_ids
from engine.grammar.token_bytes import token_bytes
from engine.link.messages import (
    Failed,
    Prefilled,
    SubmitPrefill,
)
from engine.sampling import prompt_scores
from engine.sampling.history import history_of
from engine.sampling.sampler import SampleRow, sample
from engine.sampling.sampling_params import Grammar, Sampling
from tests.larks import regex
from tests.prefill_worker.one_rank import (
    PAGE,
    Model,
    OneRank,
    TargetRank,
    prefilled,
    submit_to,
    tokens,
)

ECHO = Sampling(prompt_logprobs=True, top_prompt_logprobs=3)


def check_logprobs(folder: Path, prompt: list[int], message: Prefilled, num_top: int) -> None:
    reference = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(1)
    assert [token.token_id for token in message.prompt_logprobs] == prompt
    for position, token in enumerate(message.prompt_logprobs):
        if position == 0:
            assert token.top == ()
            continue
        row = expected[position - 1]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
        assert [one for one, _ in token.top] == row.topk(num_top).indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-3
        )


@pytest.mark.parametrize("num_tokens", [1, 2, PAGE, 3 * PAGE + 1, 75])
@pytest.mark.parametrize("chunk_tokens", [PAGE, 1024])
@pytest.mark.parametrize("slice_tokens", [5, 64])
def test_log_probabilities_are_those_of_transformers(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    chunk_tokens: int,
    slice_tokens: int,
) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_TOKENS", slice_tokens)
    rank, target = OneRank(model, chunk_tokens=chunk_tokens), TargetRank(model)
    submit = submit_to(target, "a", tokens(num_tokens), ECHO)
    other = submit_to(target, "b", tokens(30, seed=1))
    messages = rank.run(rank.tell(submit, other))
    result = prefilled(messages, "a")
    check_logprobs(model.folder, unpack_ids(submit.token_ids).tolist(), result, 3)
    for one in (submit, other):
        kv, logits = model.reference(one.token_ids)
        torch.testing.assert_close(target.kv(one), kv, rtol=1e-4, atol=1e-5)
        token = prefilled(messages, one.attempt_id).token
        assert token is not None
        assert token.token_id == int(logits.argmax())
    assert prefilled(messages, "b").prompt_logprobs == ()
    rank.check_nothing_held()


def test_known_prefixes_are_computed_again_and_stay_known(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    prompt = tokens(70)
    messages = rank.run(
        submit_to(target, "fresh", prompt, ECHO),
        submit_to(target, "after", prompt),
        submit_to(target, "again", prompt, ECHO),
    )
    cached = [prefilled(messages, name).num_cached_tokens for name in ("fresh", "after", "again")]
    assert cached == [0, 64, 0]
    fresh, again = (prefilled(messages, name).prompt_logprobs for name in ("fresh", "again"))
    assert fresh == again
    rank.check_nothing_held()


def test_nothing_is_sampled_where_no_token_is_wanted(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    submit = submit_to(target, "a", tokens(20), Sampling(prompt_logprobs=True, max_tokens=0))
    result = prefilled(rank.run(submit), "a")
    assert result.token is None
    check_logprobs(model.folder, unpack_ids(submit.token_ids).tolist(), result, 0)


def test_who_has_output_has_had_them(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    submit = msgspec.structs.replace(submit_to(target, "a", tokens(20), ECHO), num_prompt_tokens=19)
    assert prefilled(rank.run(submit), "a").prompt_logprobs == ()


# ---- first tokens


def begun(submit: SubmitPrefill, num_output: int) -> SubmitPrefill:
    """The last tokens are output of an earlier attempt."""
    num_prompt = submit.num_tokens - num_output
    return msgspec.structs.replace(submit, num_prompt_tokens=num_prompt)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.7),
        Sampling(logit_bias=((77, 20.0),), temperature=1.5, seed=3),
    ],
)
def test_first_tokens_follow_the_rules(model: Model, sampling: Sampling) -> None:
    rank, target = OneRank(model), TargetRank(model)
    submit = begun(submit_to(target, "a", tokens(40) + [9, 9, 9, 12], sampling), 4)
    result = prefilled(rank.run(submit), "a")
    _, logits = model.reference(submit.token_ids)
    token_ids = unpack_ids(submit.token_ids)
    history = history_of(sampling, token_ids[:40], token_ids[40:])
    row = SampleRow(sampling=sampling, position=44, history=history)
    assert result.token == sample(logits[None], [row])[0]


def until_compiled(rank: OneRank) -> None:
    waiting = rank.loop._first_tokens._grammars._waiting.values()
    deadline = time.monotonic() + 30
    while not all(one.compiled.done() for one in waiting):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_grammars_are_kept_to_from_where_the_output_is(model: Model, folder: Path) -> None:
    texts = token_bytes(folder, 260).texts
    a, b, c = (texts.index(one) for one in (b"a", b"b", b"c"))
    rank, target = OneRank(model), TargetRank(model)
    abc = Sampling(grammar=Grammar(lark=regex("abc")))
    submits = [
        submit_to(target, "first", tokens(20), abc),
        begun(submit_to(target, "second", [*tokens(20), a], abc), 1),
        begun(submit_to(target, "third", [*tokens(20), a, b], abc), 2),
        begun(submit_to(target, "wrong", [*tokens(20), b], abc), 1),
        submit_to(target, "bad", tokens(20), Sampling(grammar=Grammar(lark=regex("(a")))),
        submit_to(target, "free", tokens(20, seed=4)),
    ]
    messages = rank.run(rank.tell(*submits), lambda: until_compiled(rank))
    found = {m.attempt_id: m for m in messages if isinstance(m, Prefilled)}
    chosen = [found[name].token for name in ("first", "second", "third")]
    assert [token.token_id for token in chosen if token is not None] == [a, b, c]
    assert "free" in found
    failed = {m.attempt_id: m for m in messages if isinstance(m, Failed)}
    assert {failed["wrong"].code, failed["bad"].code} == {"INVALID_ARGUMENT"}
    assert "unclosed group" in failed["bad"].message
    rank.check_nothing_held()


def test_higher_priorities_are_computed_first(model: Model) -> None:
    rank, target = OneRank(model, chunk_tokens=PAGE), TargetRank(model, num_pages=256)
    submits = [
        msgspec.structs.replace(
            submit_to(target, f"a{number}", tokens(2 * PAGE, seed=number)), priority=priority
        )
        for number, priority in enumerate((0, 3, -1, 3, 0))
    ]
    messages = rank.run(rank.tell(*submits))
    order = [m.attempt_id for m in messages if isinstance(m, Prefilled)]
    assert order == ["a1", "a3", "a0", "a4", "a2"]
    rank.check_nothing_held()
