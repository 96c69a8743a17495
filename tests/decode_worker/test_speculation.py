"""A rank that drafts answers as one that does not, token for token."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.grammar import paced_match
from engine.link.messages import Produced
from engine.sampling.sampling_params import Grammar, ThoughtBudget
from tests.cluster.harness import DEMO_MODEL
from tests.decode_worker.one_rank import OneRank, one_rank
from tests.larks import regex
from tests.tiny_checkpoint import make_tiny_checkpoint

PROMPTS = [[(7 * n + 3 * j) % 250 + 5 for j in range(length)] for n, length in enumerate((1, 23))]
# A page has 8 tokens.
WAYS: Mapping[str, Mapping[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.7, "seed": 6, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "logprobs": {"temperature": 0.5, "logprobs": True, "top_logprobs": 3},
    "ends": {"ignore_eos": False, "min_tokens": 3, "temperature": 1.0},
    "stops": {"stop_token_ids": tuple(range(20, 90)), "min_tokens": 2, "temperature": 1.0},
    "biased": {"logit_bias": ((30, 4.0), (40, -3.0)), "temperature": 1.0},
    "penalised": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.1},
    "banned": {"bad_words": tuple((n, m) for n in range(99) for m in range(30, 99, 2))},
    "thoughts": {
        "thought_budget": ThoughtBudget(
            max_tokens=6, open_token_id=1, close_token_ids=(40,), is_open=True
        )
    },
    "matched": {"grammar": Grammar(lark=regex("[0-9 ]{5,30}")), "ignore_eos": False},
    "later": {
        "grammar": Grammar(lark=regex("[a-z]+"), after_token_id=32),
        "presence_penalty": 1.0,
        "logit_bias": ((32, 4.0),),
        "temperature": 1.0,
        "seed": 4,
    },
}


@pytest.fixture(scope="module", params=["demo", "random"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose MTP layer is right most of the time, and one whose is not."""
    if request.param == "demo":
        return DEMO_MODEL
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    with one_rank(folder, tmp_path_factory.mktemp("plain")) as rank:
        return answers(rank)


def answers(rank: OneRank) -> dict[str, list[object]]:
    """Of all prompts in all ways, at once."""
    for way, sampling in WAYS.items():
        for number, prompt in enumerate(PROMPTS):
            rank.submit(f"{way} {number}", prompt, max_tokens=15 + number, **sampling)
    rank.run(120)
    return {
        name: [answer.tokens, answer.finish, [round(each, 3) for each in answer.logprobs]]
        for name, answer in rank.answers.items()
    }


@pytest.mark.parametrize(("num_drafts", "num_pages"), [(1, 64), (3, 8)])
def test_drafts_change_no_answer(
    folder: Path,
    tmp_path: Path,
    expected: dict[str, list[object]],
    num_drafts: int,
    num_pages: int,
) -> None:
    """In a pool of a few pages requests are preempted."""
    values = {"speculative_tokens": num_drafts, "num_pages": num_pages}
    with one_rank(folder, tmp_path, **values) as rank:
        assert answers(rank) == expected
        rank.until_free(num_pages)
        stats = rank.stats
        assert len(stats.drafts_proposed_total) == num_drafts
        assert stats.drafts_proposed_total > (0,) * num_drafts
        # Prompts that make no sense: an MTP layer that was trained is right now and then.
        share = stats.drafts_accepted_total[0] / stats.drafts_proposed_total[0]
        assert share > 0.3 if folder == DEMO_MODEL else share < 0.2


REPEATING: Mapping[str, Mapping[str, object]] = {
    "one": {"allowed_token_ids": (30,)},
    "two": {"allowed_token_ids": (30, 31), "temperature": 1.0, "seed": 3},
    "words": {"grammar": Grammar(lark=regex("(ab|cd)+")), "temperature": 1.0, "seed": 4},
}


def test_drafts_that_are_looked_up_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", 60.0)
    folder = make_tiny_checkpoint(tmp_path / "model")
    seen = []
    for values in ({}, {"speculative_tokens": 3, "speculative_method": "ngram"}):
        with one_rank(folder, tmp_path, **values) as rank:
            for name, sampling in REPEATING.items():
                rank.submit(name, PROMPTS[1], max_tokens=40, **sampling)
            rank.run(60)
            seen.append({name: answer.tokens for name, answer in rank.answers.items()})
            rank.until_free(64)
            proposed, accepted = rank.stats.drafts_proposed_total, rank.stats.drafts_accepted_total
    assert seen[0] == seen[1]
    assert len(proposed) == 3
    assert 10 < accepted[0] < proposed[0]


def test_what_a_grammar_allows_is_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", 60.0)
    grammar = Grammar(lark=regex("(.|\\n)+"))
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    with one_rank(DEMO_MODEL, tmp_path, speculative_tokens=2) as rank:
        for text in ("What is 37 + 48? 37 + 48 =", "One, two, three, four,"):
            prompt = tokenizer.encode(text).ids
            rank.submit(text, prompt, max_tokens=30, min_tokens=30, grammar=grammar)
        rank.run(120)
        produced = [message for message in rank.heard if isinstance(message, Produced)]
        assert sum(message.num_accepted for message in produced) > 5
        rank.until_free(64)
