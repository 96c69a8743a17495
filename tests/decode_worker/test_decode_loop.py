"""The loop of a rank against transformers: same tokens whatever happens to a request."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.link.messages import Failed, Finish, Produced
from tests.decode_worker.one_rank import OneRank, one_rank, reference_tokens
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.transfer.memory import MemoryTransfer

PROMPTS = [
    [(7 * n + 3 * j) % 250 + 5 for j in range(length)]
    for n, length in enumerate((1, 7, 8, 9, 23, 40))
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [reference_tokens(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def rank(folder: Path, tmp_path: Path) -> Iterator[OneRank]:
    with one_rank(folder, tmp_path) as running:
        yield running


def memory(rank: OneRank) -> MemoryTransfer:
    assert isinstance(rank.prefill.transfer, MemoryTransfer)
    return rank.prefill.transfer


def test_tokens_equal_those_of_transformers_alone_and_together(
    rank: OneRank, expected: list[list[int]]
) -> None:
    for number, prompt in enumerate(PROMPTS):
        rank.submit(f"alone{number}", prompt, max_tokens=NUM_TOKENS)
        rank.run()
    for number, prompt in enumerate(PROMPTS):
        rank.submit(f"together{number}", prompt, max_tokens=NUM_TOKENS)
    rank.run()
    for kind in ("alone", "together"):
        tokens = [rank.answers[f"{kind}{number}"].tokens for number in range(len(PROMPTS))]
        assert tokens == expected
    assert rank.stats.preemptions_total == 0
    rank.until_free(64)
    assert rank.stats.tokens_generated_total == 2 * len(PROMPTS) * NUM_TOKENS
    assert rank.stats.tokens_transferred_total == 2 * sum(map(len, PROMPTS))


def test_preemption_changes_no_token_and_loses_no_page(
    folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with one_rank(folder, tmp_path, num_pages=9) as rank:
        for number, prompt in enumerate(PROMPTS):
            rank.submit(f"r{number}", prompt, max_tokens=NUM_TOKENS)
        rank.run()
        assert [rank.answers[f"r{n}"].tokens for n in range(len(PROMPTS))] == expected
        assert rank.stats.preemptions_total > 0
        assert sum(answer.num_attempts for answer in rank.answers.values()) > len(PROMPTS)
        rank.until_free(9)


def test_random_sampling_depends_on_seed_and_position_only(folder: Path, tmp_path: Path) -> None:
    tokens = []
    for num_pages in (64, 9):
        with one_rank(folder, tmp_path, num_pages=num_pages) as rank:
            for number, prompt in enumerate(PROMPTS):
                rank.submit(
                    f"r{number}", prompt, max_tokens=NUM_TOKENS, temperature=1.0, seed=number
                )
            rank.run()
            tokens.append([rank.answers[f"r{n}"].tokens for n in range(len(PROMPTS))])
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != reference_tokens(folder, PROMPTS[0], NUM_TOKENS)


def test_end_rules_count_from_the_prompt(rank: OneRank, expected: list[list[int]]) -> None:
    prompt, tokens = PROMPTS[4], expected[4]
    stop = next(index for index in range(3, NUM_TOKENS) if tokens[index] not in tokens[:index])
    rank.submit("stop", prompt, max_tokens=NUM_TOKENS, stop_token_ids=(tokens[stop],))
    rank.submit("first", prompt, stop_token_ids=(tokens[0],))
    rank.submit("one", prompt, max_tokens=1)
    rank.submit("context", prompt, max_tokens=10_000)
    rank.run()
    assert rank.answers["stop"].tokens == tokens[: stop + 1]
    assert rank.answers["first"].tokens == tokens[:1]
    assert rank.answers["one"].tokens == tokens[:1]
    finishes = [rank.answers[name].finish for name in ("stop", "first", "one", "context")]
    assert finishes == [Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.LENGTH]
    assert len(rank.answers["context"].tokens) == 64 * 8 - len(prompt)
    rank.until_free(64)


def test_min_tokens_keeps_stop_tokens_away(rank: OneRank, expected: list[list[int]]) -> None:
    tokens = expected[3]
    rank.submit("r", PROMPTS[3], max_tokens=8, min_tokens=6, stop_token_ids=(tokens[2],))
    rank.run()
    assert rank.answers["r"].tokens[:2] == tokens[:2]
    assert tokens[2] not in rank.answers["r"].tokens[:5]


def test_a_request_goes_on_where_another_worker_left_it(
    rank: OneRank, expected: list[list[int]]
) -> None:
    answer = rank.submit("r", PROMPTS[4], max_tokens=NUM_TOKENS)
    rank.run()
    half = answer.tokens[:10]
    again = rank.submit("again", PROMPTS[4], half, max_tokens=NUM_TOKENS)
    rank.run()
    assert half + again.tokens == expected[4]


def test_no_token_before_all_kv_is_there(rank: OneRank, expected: list[list[int]]) -> None:
    memory(rank).held = True
    rank.submit("r", PROMPTS[5], max_tokens=4)
    rank.until(lambda: rank.answers["r"].num_attempts)
    rank.hear(0.3)
    assert rank.answers["r"].tokens == []
    memory(rank).deliver()
    rank.run()
    assert rank.answers["r"].tokens == expected[5][:4]


def test_kv_that_is_lost_fails_the_request_and_keeps_its_pages_aside(
    folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with one_rank(folder, tmp_path, num_pages=16, kv_arrival_seconds=1.0) as rank:
        memory(rank).drop_next(1)  # one layer of three
        rank.submit("lost", PROMPTS[5], max_tokens=4)
        rank.run()
        (failed,) = [message for message in rank.heard if isinstance(message, Failed)]
        assert failed.code == "UNAVAILABLE"
        assert rank.answers["lost"].tokens == []
        rank.until(lambda: rank.stats.pages_quarantined == 5)
        rank.submit("next", PROMPTS[5], max_tokens=4)
        rank.run()
        assert rank.answers["next"].tokens == expected[5][:4]
        rank.until_free(16)


def test_aborts_at_any_point_free_everything(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    with one_rank(folder, tmp_path, num_pages=20) as rank:
        for number in range(60):
            name = f"r{number}"
            memory(rank).held = chance.random() < 0.3
            rank.answering = chance.random() < 0.8
            rank.submit(name, chance.choice(PROMPTS), max_tokens=NUM_TOKENS)
            for _ in range(chance.randrange(6)):
                rank.hear(0.01)
            rank.abort(chance.choice(list(rank.answers)))
            if number % 10 == 9:
                rank.release()
                memory(rank).deliver()
        for name in rank.answers:
            rank.abort(name)
        rank.run()
        memory(rank).deliver()
        rank.until_free(20)
        assert rank.stats.num_running == rank.stats.num_waiting == 0
        ended = len([m for m in rank.heard if isinstance(m, Produced) and m.finish])
        assert ended < 60


def test_an_idle_rank_reports_each_second_and_burns_nothing(rank: OneRank) -> None:
    assert rank.hear(20)
    before = rank.stats.num_steps
    assert rank.hear(20)
    assert rank.stats.num_steps == before == 0
