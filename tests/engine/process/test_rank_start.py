"""What a rank says of itself before its loop has run, with all that it would compute left out."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.kv.kv_memory import KvPlan
from engine.link.messages import Failed, RankStats
from engine.process.rank_start import RankStart
from engine.process.settings import WorkerSettings
from engine.start import rank as engine_rank
from engine.start.kernel_paths import kernel_paths
from engine.start.rank import RankContext, run_rank
from model.batch import AttentionForm
from tests.model.test_dummy_checkpoint import FP8, config_folder, load

Said = list[tuple[object, RankStats]]
NAMED = {"mla_decode": "cuda+flash_mla", "rms_norm": "triton"}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> RankStart:
    """Of the rank that this process is about to be."""
    start = RankStart(
        role="decode", epoch="e", local_rank=0, rank=3, size=4, rendezvous="", endpoint="",
        front_pid=os.getpid(), settings={},
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
    return SimpleNamespace(
        **{"ready": None, "kv_plan": plan, "kernel_paths": NAMED, "close": lambda: None} | fields
    )


@pytest.mark.usefixtures("start")
def test_all_pages_are_free_at_first(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Routers see these figures until the loop's first report, a second later."""
    monkeypatch.setattr(engine_rank, "build_context", lambda *_: built_context())
    run_rank(lambda _context: None)
    assert [(stats.pages_total, stats.pages_free) for _, stats in said] == [(12, 12)]


@pytest.mark.usefixtures("start", "said")
def test_a_line_names_the_paths_of_all_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rank, "build_context", lambda *_: built_context())
    with capture_logs() as lines:
        run_rank(lambda _context: None)
    assert lines == [{"event": "kernels", "log_level": "info", "rank": 3} | NAMED]


@pytest.mark.parametrize(("role", "most"), [("decode", 5), ("prefill", 700)])
def test_paths_are_those_of_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, most: int
) -> None:
    """Of as many rows as a decode rank runs, of as many tokens as a prefill pass has."""
    asked: list[tuple[object, ...]] = []

    def spied(*given: object, **sizes: int) -> dict[str, str]:
        asked.append((*given[1:], sizes))
        return kernel_paths(*given, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_rank, "kernel_paths", spied)
    folder = config_folder(tmp_path, FP8)
    context: Any = built_context(
        start=SimpleNamespace(role=role),
        settings=WorkerSettings(model=folder, max_running=5, chunk_tokens=700, page_tokens=16),
        model=load(folder),
        kv_cache=torch.empty(0),
    )
    found = RankContext.kernel_paths.fget(context)  # type: ignore[attr-defined]
    assert set(found.values()) == {"reference"}
    assert {"mla_decode", "rms_norm", "grouped_linear"} < set(found)
    form = AttentionForm.ABSORBED if role == "decode" else AttentionForm.PLAIN
    sizes = {"page_tokens": 16, "most_tokens": most}
    assert asked == [(torch.device("cpu"), form, sizes)]


@pytest.mark.usefixtures("start")
def test_a_library_that_cannot_be_loaded_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    class Broken(SimpleNamespace):
        @property
        def kernel_paths(self) -> dict[str, str]:
            raise ImportError("flash_mla: undefined symbol")

    monkeypatch.setattr(engine_rank, "build_context", lambda *_: Broken())
    with pytest.raises(SystemExit) as ended:
        run_rank(lambda _context: None)
    assert ended.value.code == 1
    ((message, _),) = said
    assert isinstance(message, Failed)
    assert message.message == "ImportError: flash_mla: undefined symbol"
