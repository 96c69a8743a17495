"""Penalties and biases against transformers' processors, and against definitions in numpy."""

import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from engine.sampling.history import History, history_of
from engine.sampling.logit_rules import apply_history
from engine.sampling.sampler import SampleRow, sample
from engine.sampling.sampling_params import Sampling

VOCAB = 70
TOKEN = st.integers(0, VOCAB - 1)
PENALTY = st.sampled_from([-2.0, -0.3, 0.0, 0.7, 2.0])


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Sampling, list[int], int]:
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=40))
    output = draw(st.lists(TOKEN, max_size=60))
    sampling = Sampling(
        frequency_penalty=draw(PENALTY),
        presence_penalty=draw(PENALTY),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])),
        logit_bias=tuple(draw(st.dictionaries(TOKEN, st.floats(-100, 100, width=32))).items()),
    )
    return sampling, prompt + output, len(prompt)


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def naive(
    logits: torch.Tensor, sampling: Sampling, tokens: list[int], num_prompt: int
) -> np.ndarray:
    """Bias and repetition by transformers, the other two token by token."""
    scores = logits.clone()[None]
    if sampling.logit_bias:
        bias = SequenceBiasLogitsProcessor({(t,): b for t, b in sampling.logit_bias})
        scores = bias(torch.tensor([tokens]), scores)
    repetition = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    row = repetition(torch.tensor([tokens]), scores)[0].double().numpy()
    output = tokens[num_prompt:]
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return row


@given(batch=st.lists(sequences(), min_size=1, max_size=5))
def test_rules_are_those_of_transformers_and_openai(
    batch: list[tuple[Sampling, list[int], int]],
) -> None:
    logits = logits_of(len(batch))
    kept = logits.clone()
    histories = [
        history_of(sampling, tokens[:num], tokens[num:]) for sampling, tokens, num in batch
    ]
    changed = apply_history(logits, histories)
    assert torch.equal(logits, kept)
    for row, one in enumerate(batch):
        np.testing.assert_allclose(changed[row].numpy(), naive(logits[row], *one), atol=1e-4)
        alone = apply_history(logits[row : row + 1], [histories[row]])
        assert torch.equal(alone[0], changed[row])  # whoever else is in the batch


@given(one=sequences())
def test_a_history_that_grew_equals_one_that_begins_with_all_tokens(
    one: tuple[Sampling, list[int], int],
) -> None:
    sampling, tokens, num_prompt = one
    logits = logits_of(1)
    grown = History(sampling, tokens[:num_prompt], [])
    for end in range(num_prompt, len(tokens) + 1):
        anew = History(sampling, tokens[:num_prompt], tokens[num_prompt:end])
        assert torch.equal(apply_history(logits, [grown]), apply_history(logits, [anew]))
        if end < len(tokens):
            assert grown.append(tokens[end])


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_greedy_and_random_tokens_follow_the_rules(seed: int) -> None:
    logits = logits_of(2, seed)
    best = int(logits[0].argmax())
    sampling = Sampling(logit_bias=((best, -100.0),))
    row = SampleRow(sampling=sampling, position=3, history=history_of(sampling, [1, 2, 3], []))
    assert sample(logits[:1], [row])[0].token_id == int(logits[0].topk(2).indices[1])
    wanted = (best + 1) % VOCAB
    sampling = Sampling(temperature=1.9, seed=seed, logit_bias=((wanted, 100.0),), logprobs=True)
    row = SampleRow(sampling=sampling, position=3, history=history_of(sampling, [1, 2, 3], []))
    plain = SampleRow(sampling=Sampling(), position=3)
    forced, other = sample(logits, [row, plain])
    assert forced.token_id == wanted
    assert other.token_id == int(logits[1].argmax())
    unmodified = float(logits[0].log_softmax(0)[wanted])  # what the model itself thinks of it
    assert abs(forced.logprob - unmodified) < 1e-5


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert history_of(Sampling(temperature=1.0, min_tokens=4), [1], [2]) is None
    logits = logits_of(2)
    assert apply_history(logits, [None, None]) is logits


def test_cost_of_a_sequence_is_linear() -> None:
    sampling = Sampling(frequency_penalty=0.5)

    def seconds(num_tokens: int) -> float:
        began = time.process_time()
        history = History(sampling, [0], [])
        for token in range(num_tokens):
            history.append(token)
        return time.process_time() - began

    seconds(1000)
    few, many = (min(seconds(number) for _ in range(3)) for number in (20_000, 80_000))
    assert many < 10 * max(few, 0.01)
