"""An overlapped schedule against the plain one: same tokens, same ends, same pages."""

import math
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.rank_stats import StepLog
from engine.grammar import paced_match
from engine.link.messages import (
    Finish,
    Produced,
    Reserved,
    TokenOut,
)
from engine.sampling.sampling_params import Grammar
from engine.step.pending_step import PendingStep
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from model.batch import AttentionForm, ForwardBatch
from model.deepseek import DeepseekV3
from tests.decode_worker.one_rank import OneRank, one_rank
from tests.larks import regex
from tests.tiny_checkpoint import make_tiny_checkpoint

NUM_TOKENS = 14
PROMPTS = [[(11 * n + 3 * j) % 250 + 5 for j in range(n)] for n in (1, 8, 23)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.1, "seed": 3, "top_p": 0.9},
    "scored": {"temperature": 0.8, "seed": 9, "logprobs": True, "top_logprobs": 3},
    "biased": {"logit_bias": ((50, 4.0), (51, 4.0)), "temperature": 1.0, "seed": 1},
    "late": {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(5, 200))},
    "stops": {"temperature": 1.5, "seed": 2, "stop_token_ids": tuple(range(0, 260, 9))},
}
BY_HISTORY: dict[str, dict[str, Any]] = {
    "penalised": {"frequency_penalty": 1.2, "repetition_penalty": 1.3},
    "grammar": {"grammar": Grammar(lark=regex("[ab]{3,7}(c[0-9]{2})+")), "temperature": 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def submit_all(rank: OneRank, kinds: dict[str, dict[str, Any]]) -> None:
    for kind, sampling in kinds.items():
        for number, prompt in enumerate(PROMPTS):
            rank.submit(f"{kind}{number}", prompt, max_tokens=NUM_TOKENS + number, **sampling)


def submit_to_begin_together(rank: OneRank, kinds: dict[str, dict[str, Any]]) -> None:
    """So many that a small pool has no page for what they grow by."""
    rank.answering = False
    submit_all(rank, kinds)
    rank.until(lambda: sum(one.num_attempts for one in rank.answers.values()) >= 9)
    rank.answering = True
    reserved = [message for message in rank.heard if isinstance(message, Reserved)]
    rank.send(*map(rank.prefilled, reserved))


def answers_of(rank: OneRank) -> dict[str, tuple[list[int], Finish]]:
    return {name: (answer.tokens, answer.finish) for name, answer in rank.answers.items()}


def tokens_of(rank: OneRank, name: str) -> list[TokenOut]:
    produced = [one for one in rank.heard if isinstance(one, Produced) and one.request_id == name]
    return [token for one in produced for token in one.tokens]


@pytest.mark.parametrize("num_pages", [256, 16])
def test_same_answers_as_without(folder: Path, tmp_path: Path, num_pages: int) -> None:
    seen = []
    for overlap in (False, True):
        with one_rank(
            folder,
            tmp_path,
            num_pages=num_pages,
            max_running=12,
            overlap_schedule=overlap,
        ) as rank:
            submit_to_begin_together(rank, KINDS)
            rank.run()
            submit_all(rank, {f"again {kind}": KINDS[kind] for kind in ("greedy", "seeded")})
            submit_all(rank, BY_HISTORY)
            rank.run()
            seen.append((answers_of(rank), tokens_of(rank, "scored2")))
            assert (rank.stats.preemptions_total > 0) is (num_pages == 16)
            rank.until_free(num_pages)
            num_tokens = sum(len(answer.tokens) for answer in rank.answers.values())
            assert rank.stats.tokens_generated_total == num_tokens
    (plain, scored), (overlapped, scored_again) = seen
    assert overlapped == plain
    assert {finish for _, finish in plain.values()} == {Finish.STOP, Finish.LENGTH}
    for one, other in zip(scored, scored_again, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_aborts_while_steps_are_under_way_free_everything(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    with one_rank(folder, tmp_path, num_pages=20, overlap_schedule=True) as rank:
        rank.submit("whole", PROMPTS[2], max_tokens=NUM_TOKENS)
        rank.run()
        for number in range(40):
            kinds = KINDS | BY_HISTORY
            kind = chance.choice(list(kinds))
            prompt = chance.choice(PROMPTS)
            rank.submit(f"r{number}", prompt, max_tokens=NUM_TOKENS, **kinds[kind])
            for _ in range(chance.randrange(5)):
                rank.hear(0.01)
            rank.abort(chance.choice(list(rank.answers)))
        again = rank.submit("again", PROMPTS[2], max_tokens=NUM_TOKENS)
        rank.run()
        assert again.tokens == rank.answers["whole"].tokens
        rank.until_free(20)


def test_the_front_is_heard_while_a_step_is_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's part of two requests' begin, first token included, while the step of a third one
    takes for ever."""
    monkeypatch.setattr(StepLog, "expected_end", lambda *_: math.inf)
    gate, forward = threading.Event(), DeepseekV3.forward
    with one_rank(folder, tmp_path, overlap_schedule=True) as rank:

        def waiting(model: DeepseekV3, batch: ForwardBatch, *rest: Any) -> torch.Tensor:
            if batch.form is AttentionForm.ABSORBED:  # of the rank: prefill is played by the test
                assert gate.wait(60)
            return forward(model, batch, *rest)

        monkeypatch.setattr(DeepseekV3, "forward", waiting)
        first = rank.submit("first", PROMPTS[1], max_tokens=6)
        rank.until(lambda: len(first.tokens) == 1)
        others = [rank.submit(name, PROMPTS[2], max_tokens=6) for name in ("second", "third")]
        rank.until(lambda: all(len(answer.tokens) == 1 for answer in others))
        assert len(first.tokens) == 1
        gate.set()
        rank.run()
        assert others[0].tokens == others[1].tokens
        rank.until_free(64)


class Watched:
    """Notes when steps begin and when somebody asks for their tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        begin, result = Runner.begin, PendingStep.result

        def watched_begin(
            runner: Runner,
            chunks: Sequence[SequenceChunk],
            tokens_per_rank: tuple[int, ...],
            num_drafts: int,
        ) -> PendingStep:
            self.calls.append("launch")
            return begin(runner, chunks, tokens_per_rank, num_drafts)

        def watched_result(step: PendingStep) -> list[TokenOut | None]:
            self.calls.append("land")
            return result(step)

        patch.setattr(Runner, "begin", watched_begin)
        patch.setattr(PendingStep, "result", watched_result)


@pytest.mark.parametrize("kind", ["greedy", "scored", "penalised", "grammar"])
def test_a_step_is_launched_before_the_one_in_front_of_it_lands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Masks that are late sit steps out: here they are waited for.
    monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", 60.0)
    with one_rank(folder, tmp_path, overlap_schedule=True) as rank:
        watched = Watched(monkeypatch)
        answer = rank.submit("r", PROMPTS[1], max_tokens=8, **(KINDS | BY_HISTORY)[kind])
        rank.run()
        num_steps = len(answer.tokens) - 1  # the first one is of prefill
        # The last one is known to be the last, whatever it is: no step is launched behind it.
        assert answer.finish is Finish.LENGTH
        expected = ["launch", *["launch", "land"] * (num_steps - 1), "land"]
        # The first result is prefill's, which a runner plays as well.
        assert watched.calls[-len(expected) :] == expected
        assert watched.calls.count("launch") == num_steps
