"""A request that begins anew elsewhere, with the tokens that it has, goes on as if undisturbed:
with every feature whose next token depends on more than logits and position."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.grammar.token_bytes import token_bytes
from engine.link.messages import (
    Failed,
    Finish,
    Produced,
)
from engine.sampling.sampling_params import Grammar, ThoughtBudget
from tests.decode_worker.one_rank import Answer, OneRank, one_rank
from tests.larks import json_schema, regex
from tests.tiny_checkpoint import make_tiny_checkpoint

PROMPT = [(7 * j) % 250 + 5 for j in range(21)]
NUM_TOKENS = 20
RANDOM = {"temperature": 1.3, "seed": 5}
# Without one, this prompt's answer repeats itself.
PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.9},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((50, 9.0), (51, 8.5), (60, -100.0)), **RANDOM},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((50, 3.0),),
        **RANDOM,
    },
    "allowed": {"allowed_token_ids": tuple(range(50, 60)), **RANDOM},
    "words": {
        "bad_words": ((50, 50), (51, 50, 51), (52,)),
        "logit_bias": ((50, 9.0), (51, 9.0), (52, 9.0)),
        **RANDOM,
    },
    "budget": {
        "thought_budget": ThoughtBudget(
            max_tokens=6, open_token_id=60, close_token_ids=(61,), is_open=True
        ),
        **RANDOM,
    },
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"grammar": Grammar(lark=json_schema('{"type":"object"}')), **RANDOM},
    "regex": {"grammar": Grammar(lark=regex(r"[ab]{3,7}(c[0-9]{2})+")), **RANDOM},
    "greedy": {"grammar": Grammar(lark=regex(r"[ab]{3,7}(c[0-9]{2})+")), "frequency_penalty": 0.5},
    "later": {
        "grammar": Grammar(lark=regex("[xyz]*"), after_token_id=50),
        "logit_bias": ((50, 6.0),),
        **RANDOM,
    },
    "after thoughts": {
        "grammar": Grammar(lark=regex("[xyz]*"), after_token_id=61),
        "thought_budget": ThoughtBudget(
            max_tokens=5, open_token_id=60, close_token_ids=(61,), is_open=True
        ),
        **RANDOM,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[bytes]:
    return token_bytes(folder, 260).texts


@pytest.fixture
def rank(folder: Path, tmp_path: Path) -> Iterator[OneRank]:
    with one_rank(folder, tmp_path, num_pages=256) as running:
        yield running


def text_of(tokens: list[int], texts: list[bytes]) -> str:
    return b"".join(texts[token] for token in tokens).decode()


@pytest.mark.parametrize("name", [*PENALTIES, *GRAMMARS])
def test_a_move_at_any_position_changes_no_token(rank: OneRank, name: str) -> None:
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS} | (PENALTIES | GRAMMARS)[name]
    whole = rank.submit("whole", PROMPT, **sampling)
    plain = rank.submit("plain", PROMPT, max_tokens=NUM_TOKENS, seed=5,
                        temperature=sampling.get("temperature", 0.0))  # fmt: skip
    rank.run()
    assert whole.tokens != plain.tokens  # the feature does something
    assert len(whole.tokens) > 5
    for done in range(1, len(whole.tokens)):
        rank.submit(f"moved{done}", PROMPT, whole.tokens[:done], **sampling)
    rank.run()
    for done in range(1, len(whole.tokens)):
        moved = rank.answers[f"moved{done}"]
        assert moved.tokens == whole.tokens[done:], done
        assert moved.finish is whole.finish
    rank.until_free(256)


@pytest.mark.parametrize(
    "feature",
    [PENALTIES["all"], {"grammar": Grammar(lark=regex("([ab]c?[0-9]){15,30}")), **RANDOM}],
    ids=["penalties", "grammar"],
)
def test_preemption_changes_no_token(folder: Path, tmp_path: Path, feature: dict[str, Any]) -> None:
    sampling = {"max_tokens": NUM_TOKENS} | feature
    answers: list[list[list[int]]] = []
    for num_pages in (64, 11):
        with one_rank(folder, tmp_path, num_pages=num_pages) as rank:
            for number in range(5):
                rank.submit(f"r{number}", PROMPT[number:], **(sampling | {"seed": number}))
            rank.run()
            answers.append([rank.answers[f"r{number}"].tokens for number in range(5)])
            assert (rank.stats.preemptions_total > 0) == (num_pages == 11)
            rank.until_free(num_pages)
    assert answers[0] == answers[1]


def test_outputs_match_their_grammar_and_end_where_it_does(
    rank: OneRank, texts: list[bytes]
) -> None:
    for seed in range(12):
        rank.submit(
            f"open{seed}",
            PROMPT,
            max_tokens=100,
            ignore_eos=seed % 2 > 0,
            grammar=Grammar(lark=regex("[ab]{2,5}(c[0-9])*")),
            **(RANDOM | {"seed": seed}),
        )
        rank.submit(
            f"fixed{seed}", PROMPT, min_tokens=seed, grammar=Grammar(lark=regex("(abc|def)x"))
        )
    rank.run()
    for seed in range(12):
        free, fixed = rank.answers[f"open{seed}"], rank.answers[f"fixed{seed}"]
        assert free.finish is Finish.STOP or len(free.tokens) == 100
        if free.finish is Finish.STOP:
            assert re.fullmatch("[ab]{2,5}(c[0-9])*", text_of(free.tokens, texts))
        # Nothing can follow: over at once, no matter what asks for more.
        assert fixed.finish is Finish.STOP
        assert text_of(fixed.tokens, texts) in ("abcx", "defx")
    rank.until_free(256)


def failure(rank: OneRank, name: str) -> Failed:
    (failed,) = [m for m in rank.heard if isinstance(m, Failed) and m.request_id == name]
    return failed


def test_what_cannot_follow_a_grammar_is_refused(rank: OneRank) -> None:
    rank.answering = False
    rank.submit("no grammar", PROMPT, grammar=Grammar(lark=regex("(a")))
    rank.submit("no such output", PROMPT, [50, 51], grammar=Grammar(lark=regex("a")))
    rank.run()
    for name in ("no grammar", "no such output"):
        assert failure(rank, name).code == "INVALID_ARGUMENT"
    assert "unclosed group" in failure(rank, "no grammar").message
    rank.release()
    rank.until_free(256)


def test_an_output_that_is_complete_ends_without_another_token(
    rank: OneRank, texts: list[bytes]
) -> None:
    complete = [texts.index(letter) for letter in (b"a", b"b")]
    rank.answering = False
    rank.submit("r", PROMPT, complete, grammar=Grammar(lark=regex("ab")))
    rank.run()
    (produced,) = [message for message in rank.heard if isinstance(message, Produced)]
    assert (produced.tokens, produced.finish) == ((), Finish.STOP)
    rank.until_free(256)


def test_a_prompt_alone_ends_without_a_token(rank: OneRank) -> None:
    real = rank.prefill.answer

    def without_token(*arguments: Any) -> Any:  # noqa: ANN401 - as `FakePrefill.answer`
        return msgspec.structs.replace(real(*arguments), token=None)

    rank.prefill.answer = without_token  # type: ignore[method-assign]
    answer: Answer = rank.submit("r", PROMPT, max_tokens=0, prompt_logprobs=True)
    rank.run()
    assert (answer.tokens, answer.finish) == ([], Finish.LENGTH)
    rank.until_free(256)


def test_higher_priorities_go_first(folder: Path, tmp_path: Path) -> None:
    with one_rank(folder, tmp_path, num_pages=64, max_running=1) as rank:
        for number, priority in enumerate((0, 0, 5, -1, 5, 0)):
            rank.submit(f"r{number}", PROMPT, priority=priority, max_tokens=8)
        rank.run()
        ends = [m.request_id for m in rank.heard if isinstance(m, Produced) and m.finish]
        # The first one may have begun before the others came.
        rest = [name for name in ends if name != "r0"]
        assert rest == ["r2", "r4", "r1", "r5", "r3"]
