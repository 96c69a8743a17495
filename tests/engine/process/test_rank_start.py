"""What a rank says of itself before its loop has run, with all that it would compute left out."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.kv.kv_memory import KvPlan
from engine.link.messages import Failed, RankStats
from engine.process.rank_start import RankStart
from engine.start import rank as engine_rank
from engine.start.rank import run_rank

Said = list[tuple[object, RankStats]]
NAMED = {"mla_decode": "cuda+flash_mla", "rms_norm": "triton"}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> RankStart:
    """Of the rank that this process is about to be."""
    start = RankStart(
        role="decode", epoch="e", local_rank=0, rank=3, size=4, rendezvous="", group_secret="",
        endpoint="", front_pid=os.getpid(), settings={},
    )  # fmt: skip
    for name, value in start.to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine_rank, "die_with_parent", lambda _pid: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda _status: None)
    return start


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """To its front."""
    said: Said = []
    link: Any = SimpleNamespace(
        send=lambda messages, stats: said.append((messages[0], stats)), close=lambda: None
    )
    monkeypatch.setattr(engine_rank, "RankLink", lambda *_: link)
    return said


def built_context(**fields: object) -> SimpleNamespace:
    plan = KvPlan(num_pages=12, page_bytes=1, max_model_len=1)
    return SimpleNamespace(**{"ready": None, "kv_plan": plan, "close": lambda: None} | fields)


@pytest.mark.usefixtures("start")
def test_all_pages_are_free_at_first(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Routers see these figures until the loop's first report, a second later."""
    monkeypatch.setattr(engine_rank, "build_context", lambda *_: built_context())
    run_rank(lambda _context: None)
    assert [(stats.pages_total, stats.pages_free) for _, stats in said] == [(12, 12)]


@pytest.mark.usefixtures("start", "said")
def test_a_line_names_the_paths_of_all_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rank, "build_context", lambda *_: built_context())
    monkeypatch.setattr(engine_rank, "noted", lambda: NAMED)
    with capture_logs() as lines:
        run_rank(lambda _context: None)
    assert lines == [{"event": "kernels", "log_level": "info", "rank": 3} | NAMED]


@pytest.mark.usefixtures("start")
def test_a_library_that_cannot_be_loaded_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("flash_mla: undefined symbol")

    monkeypatch.setattr(engine_rank, "build_context", broken)
    with pytest.raises(SystemExit) as ended:
        run_rank(lambda _context: None)
    assert ended.value.code == 1
    ((message, _),) = said
    assert isinstance(message, Failed)
    assert message.message == "ImportError: flash_mla: undefined symbol"
