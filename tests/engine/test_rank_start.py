"""What a rank says of itself before its loop has run, with all that it would compute left out."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import rank as engine_rank
from engine.kv_memory import KvPlan
from engine.rank import run_rank
from engine.rank_start import RankStart


def test_all_pages_are_free_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers see these figures until the loop's first report, a second later."""
    start = RankStart(
        role="decode", epoch="e", local_rank=0, rank=0, size=1, rendezvous="", endpoint="",
        front_pid=os.getpid(), settings={},
    )  # fmt: skip
    for name, value in start.to_environment().items():
        monkeypatch.setenv(name, value)
    said: list[tuple[int, int]] = []
    link: Any = SimpleNamespace(
        send=lambda _messages, stats: said.append((stats.pages_total, stats.pages_free)),
        close=lambda: None,
    )
    context: Any = SimpleNamespace(
        ready=None,
        kv_plan=KvPlan(num_pages=12, page_bytes=1, max_model_len=1),
        kv_cache=torch.empty(0),
        close=lambda: None,
    )
    monkeypatch.setattr(engine_rank, "RankLink", lambda *_: link)
    monkeypatch.setattr(engine_rank, "build_context", lambda *_: context)
    monkeypatch.setattr(engine_rank, "die_with_parent", lambda _pid: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda _status: None)
    run_rank(lambda _context: None)
    assert said == [(12, 12)]
