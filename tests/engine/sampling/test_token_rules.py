"""Tokens that are named, forbidden or forced: words against transformers' processor, thoughts
against their definition."""

from collections.abc import Sequence

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from engine.sampling.history import History, history_of
from engine.sampling.sampler import SampleRow, sample
from engine.sampling.sampling_params import Sampling, ThoughtBudget

VOCAB = 8
OPEN, CLOSE, ALSO = 5, 6, 7
TOKEN = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


def best(logits: torch.Tensor, history: History | None, **fields: tuple[int, ...]) -> int:
    row = SampleRow(sampling=Sampling(), position=3, history=history, **fields)
    return sample(logits[None], [row])[0].token_id


def generated(sampling: Sampling, output: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy, by logits that depend on the position only, after `output`."""
    history = history_of(sampling, [1], output)
    tokens = list(output)
    while len(tokens) < num_tokens:
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(tokens)))
        tokens.append(best(logits, history))
        assert history is None or history.append(tokens[-1])
    return tokens


@given(words=WORDS, output=st.lists(TOKEN, max_size=12))
def test_bad_words_are_those_of_transformers(
    words: list[tuple[int, ...]], output: list[int]
) -> None:
    logits = torch.zeros(1, VOCAB)
    reference = NoBadWordsLogitsProcessor([list(word) for word in words])
    scores = reference(torch.tensor([output], dtype=torch.int64), logits.clone())
    history = History(Sampling(bad_words=tuple(words)), prompt=[1, 2, 3], output=output)
    assert set(history.banned) == set(scores[0].isneginf().nonzero().flatten().tolist())


def test_only_allowed_tokens_come() -> None:
    logits = torch.arange(VOCAB).float()
    history = history_of(Sampling(allowed_token_ids=(1, 3)), [1], [])
    assert best(logits, history) == 3
    assert best(logits, history, suppressed=(3,)) == 1
    assert best(logits, history, suppressed=(3, 1)) == 3  # nothing else is left
    assert history is not None
    assert not history.follows_tokens


def is_kept_to(budget: ThoughtBudget, output: list[int]) -> bool:
    """Whether the first thoughts are no longer than they may be."""
    thoughts = output[1:] if budget.is_open and output[:1] == [OPEN] else output
    if not budget.is_open:
        thoughts = output[output.index(OPEN) + 1 :] if OPEN in output else []
    ends = [at for at, token in enumerate(thoughts) if token in budget.close_token_ids]
    return (ends[0] if ends else len(thoughts)) <= budget.max_tokens


@given(
    sampling=st.builds(
        Sampling,
        bad_words=WORDS.map(tuple),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        thought_budget=st.builds(
            ThoughtBudget,
            max_tokens=st.integers(0, 6),
            open_token_id=st.just(OPEN),
            close_token_ids=st.sampled_from([(CLOSE,), (CLOSE, ALSO)]),
            is_open=st.booleans(),
        ),
    ),
    cut=st.integers(0, 20),
)
def test_thoughts_end_in_time_also_where_a_request_moves(sampling: Sampling, cut: int) -> None:
    tokens = generated(sampling, [], 20)
    assert sampling.thought_budget is not None
    assert is_kept_to(sampling.thought_budget, tokens)
    assert generated(sampling, tokens[:cut], 20) == tokens
    words = [word for word in sampling.bad_words if CLOSE not in word]
    for word in words:
        assert not any(tuple(tokens[at : at + len(word)]) == word for at in range(20)), tokens
    free = generated(msgspec.structs.replace(sampling, thought_budget=None), [], 20)
    if is_kept_to(sampling.thought_budget, free):
        assert tokens == free  # a budget that is not used up changes nothing
