"""Compiling beside the loop: once for each grammar, never waited for, never for ever."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import EpserveError, InternalError, InvalidRequest, Overloaded
from engine.grammar import grammars as module
from engine.grammar.grammars import COMPILE_SECONDS, NUM_THREADS, Grammars
from engine.grammar.token_bytes import token_bytes
from engine.sampling.history import Match
from engine.sampling.sampling_params import Grammar, Sampling
from tests import larks
from tests.eventually import eventually
from tests.tiny_checkpoint import make_tiny_checkpoint

VOCAB, EOS = 260, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def grammars(folder: Path) -> Iterator[Grammars]:
    made = Grammars(folder, VOCAB, (EOS,), ManualClock())
    yield made
    made.close()


def regex(text: str, **values: Any) -> Sampling:  # noqa: ANN401 - fields of Grammar
    return Sampling(grammar=Grammar(lark=larks.regex(text), **values))


def wait(grammars: Grammars, num: int) -> dict[str, Match | EpserveError]:
    news: dict[str, Match | EpserveError] = {}
    deadline = time.monotonic() + 30
    while len(news) < num:
        assert time.monotonic() < deadline
        news.update(grammars.poll())
        time.sleep(0.001)
    return news


def is_match(result: Match | EpserveError) -> bool:
    return not isinstance(result, EpserveError)


async def test_each_name_is_told_once_and_has_its_own_state(
    grammars: Grammars, folder: Path
) -> None:
    x, y = (token_bytes(folder, VOCAB).texts.index(text) for text in (b"x", b"y"))
    for name in ("a", "b"):
        grammars.begin(name, regex("xy"))
    grammars.begin("later", regex("xy", after_token_id=7))
    news = wait(grammars, 3)
    assert grammars.num_waiting == 0
    assert grammars.poll() == []
    assert not any(isinstance(result, EpserveError) for result in news.values())
    a, b, later = (news[name] for name in ("a", "b", "later"))
    assert not isinstance(a, EpserveError)
    assert not isinstance(b, EpserveError)
    assert not isinstance(later, EpserveError)
    assert a.accept(x)
    assert b.accept(x)
    await eventually(lambda: a.is_ready and b.is_ready)
    assert a.accept(y)
    await eventually(lambda: a.is_ready)
    assert (a.is_complete, b.is_complete) == (True, False)
    assert (b.masks[0].is_active, later.masks[0].is_active) == (True, False)


def test_what_is_no_grammar_is_the_callers_fault(grammars: Grammars) -> None:
    grammars.begin("bad", regex("(a"))
    grammars.begin("good", regex("a"))
    news = wait(grammars, 2)
    assert is_match(news["good"])
    assert isinstance(news["bad"], InvalidRequest)
    assert "unclosed group" in news["bad"].message
    assert news["bad"].param == "grammar"


@pytest.mark.parametrize("text", [None, "{", json.dumps({"model": {"vocab": {}}})])
def test_a_tokenizer_that_cannot_be_used_is_ours(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    grammars = Grammars(tmp_path, VOCAB, (EOS,), ManualClock())
    grammars.begin("a", regex("a"))
    result = wait(grammars, 1)["a"]
    assert isinstance(result, InternalError)
    assert "tokenizer.json" in result.message
    grammars.close()


def test_nobody_waits_for_ever_or_after_leaving(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, clock = threading.Event(), threading.Event(), ManualClock()
    grammars = Grammars(folder, VOCAB, (EOS,), clock)
    real = module._compile

    def blocked(*arguments: Any) -> Any:  # noqa: ANN401 - as `module._compile`
        begun.set()
        assert go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(module, "_compile", blocked)
    began = time.monotonic()
    for name in ("gone", "late", "last"):
        grammars.begin(name, regex("a"))
    assert grammars.poll() == []
    assert time.monotonic() - began < 10  # neither begin nor poll waits
    grammars.drop("gone")
    assert begun.wait(30)
    clock.advance(COMPILE_SECONDS + 1)
    grammars.begin("last", regex("a"))
    (late,) = grammars.poll()
    assert late[0] == "late"
    assert isinstance(late[1], InvalidRequest)
    go.set()
    assert is_match(wait(grammars, 1)["last"])
    grammars.close()


def test_who_waited_behind_slow_grammars_of_others_is_not_to_blame(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, go, compile_ = ManualClock(), threading.Event(), module._compile
    begun = threading.Semaphore(0)

    def slow(*arguments: Any) -> Any:  # noqa: ANN401 - as `module._compile`
        begun.release()
        assert go.wait(30)
        return compile_(*arguments)

    monkeypatch.setattr(module, "_compile", slow)
    grammars = Grammars(folder, VOCAB, (EOS,), clock)
    for number in range(NUM_THREADS):
        grammars.begin(f"slow {number}", regex(f"{number}"))
        assert begun.acquire(timeout=30)
    grammars.begin("behind", regex("b"))
    clock.advance(COMPILE_SECONDS + 1)
    told = dict(grammars.poll())
    assert isinstance(told.pop("behind"), Overloaded)
    assert len(told) == NUM_THREADS
    assert all(isinstance(error, InvalidRequest) for error in told.values())
    go.set()
    grammars.begin("again", regex("b"))
    assert is_match(wait(grammars, 1)["again"])
    grammars.close()


def test_what_nobody_waits_for_does_not_queue_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compiled = threading.Event(), []

    def slow(_: Any, grammar: Grammar, *_others: Any) -> None:  # noqa: ANN401 - as above
        assert go.wait(30)
        compiled.append(grammar.lark)

    monkeypatch.setattr(module, "_compile", slow)
    grammars = Grammars(folder, VOCAB, (EOS,), ManualClock())
    for number in range(20):
        grammars.begin("gone", regex(f"{number}"))
        grammars.drop("gone")
    grammars.begin("awaited", regex("a"))
    go.set()
    grammars._threads.shutdown(wait=True)
    assert larks.regex("a") in compiled
    assert len(compiled) <= 1 + NUM_THREADS
