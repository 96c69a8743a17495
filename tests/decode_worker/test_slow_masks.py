"""Matches that take long: their own requests sit steps out, others go on as if they were alone."""

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.grammar import paced_match
from engine.link.messages import Failed, Finish
from engine.sampling.sampling_params import Grammar
from tests.decode_worker.one_rank import OneRank, one_rank
from tests.larks import regex
from tests.tiny_checkpoint import make_tiny_checkpoint

PROMPT = list(range(5, 16))
MATCHED: dict[str, dict[str, Any]] = {
    "endless": {"grammar": Grammar(lark=regex("[ab]{3,7}(c[0-9]{2})+")), "temperature": 1.0},
    "finite": {"grammar": Grammar(lark=regex("[ab]{5}c")), "temperature": 1.0, "seed": 4},
    "counted": {"grammar": Grammar(lark=regex("[a-f]+")), "presence_penalty": 1.0},
}
PLAIN: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.1, "seed": 3}}
Schedule = pytest.mark.parametrize("overlap", [False, True])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


class Gate:
    """Stands in for the work of matches: nothing is worked out while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self._work = paced_match._work
        monkeypatch.setattr(paced_match, "_work", self)

    def __call__(self, *arguments: Any) -> Any:
        assert self.open.wait(60)
        return self._work(*arguments)


def answers(rank: OneRank) -> dict[str, tuple[list[int], Finish]]:
    return {name: (answer.tokens, answer.finish) for name, answer in rank.answers.items()}


def submit_all(rank: OneRank) -> None:
    for name, sampling in (MATCHED | PLAIN).items():
        rank.submit(name, PROMPT, max_tokens=24, **sampling)


@Schedule
@pytest.mark.parametrize("num_pages", [64, 12])
def test_masks_that_are_always_late_change_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, num_pages: int
) -> None:
    seen = []
    for patience in (60.0, 0.0):
        monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", patience)
        options = {"num_pages": num_pages, "max_running": 8, "overlap_schedule": overlap}
        with one_rank(folder, tmp_path, **options) as rank:
            submit_all(rank)
            rank.run()
            seen.append(answers(rank))
            rank.until_free(num_pages)
    assert seen[0] == seen[1]
    assert seen[0]["finite"][1] is Finish.STOP


@Schedule
def test_others_go_on_while_one_stands_still(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    gate = Gate(monkeypatch)
    with one_rank(folder, tmp_path, num_pages=64, overlap_schedule=overlap) as rank:
        submit_all(rank)
        rank.run()
        alone = answers(rank)
        rank.answers.clear()
        slow = rank.submit("slow", PROMPT, max_tokens=24, **MATCHED["endless"])
        rank.until(lambda: len(slow.tokens) > 1)
        gate.open.clear()
        rank.submit("greedy", PROMPT, max_tokens=24)
        rank.until(lambda: rank.answers["greedy"].finish is not Finish.NONE)
        assert slow.finish is Finish.NONE
        gate.open.set()
        rank.run()
        assert answers(rank) == {"slow": alone["endless"], "greedy": alone["greedy"]}
        rank.until_free(64)


@Schedule
def test_who_is_past_its_budget_ends_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    with one_rank(folder, tmp_path, num_pages=64, overlap_schedule=overlap) as rank:
        slow = rank.submit("slow", PROMPT, max_tokens=200, **MATCHED["endless"])
        rank.submit("greedy", PROMPT, max_tokens=24)
        rank.until(lambda: len(slow.tokens) > 1)
        monkeypatch.setattr(paced_match, "ALLOWANCE_SECONDS", -1e9)
        rank.until(lambda: any(isinstance(message, Failed) for message in rank.heard))
        (failed,) = (message for message in rank.heard if isinstance(message, Failed))
        assert (failed.request_id, failed.code) == ("slow", "INVALID_ARGUMENT")
        assert "too long" in failed.message
        rank.until(lambda: rank.answers["greedy"].finish is not Finish.NONE)
        assert len(rank.answers["greedy"].tokens) == 24
        rank.until_free(64)
