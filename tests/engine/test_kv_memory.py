"""How many pages a rank gets, and what that does to the longest request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv_memory import LEAST_PAGES, KvPlan, plan_kv
from engine.settings import WorkerSettings

PAGE_BYTES = 2 * 64 * 10 * 4  # layers, tokens, kv_dim, float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def plan(folder: Path, memory_bytes: int, max_position: int = 4096, **told: Any) -> KvPlan:  # noqa: ANN401
    config: Any = SimpleNamespace(num_layers=2, kv_dim=10, max_position=max_position)
    settings = WorkerSettings(model=folder, kv_memory_fraction=0.5, **told)
    return plan_kv(settings, config, itemsize=4, memory_bytes=memory_bytes)


def test_enough_memory_gives_every_running_request_a_full_context(folder: Path) -> None:
    assert plan(folder, 10**9, max_running=8) == KvPlan(
        num_pages=8 * 64, page_bytes=PAGE_BYTES, max_model_len=4096
    )
    assert plan(folder, 10**9, max_running=1).num_pages == LEAST_PAGES


def test_too_little_memory_shortens_the_context_unless_it_was_asked_for(folder: Path) -> None:
    memory_bytes = 2 * 10 * PAGE_BYTES
    assert plan(folder, memory_bytes) == KvPlan(
        num_pages=10, page_bytes=PAGE_BYTES, max_model_len=640
    )
    with pytest.raises(ValueError, match="cannot hold one request"):
        plan(folder, memory_bytes, max_model_len=641)
    with pytest.raises(ValueError, match="no memory for KV"):
        plan(folder, PAGE_BYTES)


def test_what_was_asked_for_is_taken(folder: Path) -> None:
    assert plan(folder, 10**9, kv_pages=7).num_pages == 7
    assert plan(folder, 10**9, kv_pages=7).max_model_len == 7 * 64
    assert plan(folder, 10**9, kv_pages=70, max_model_len=9999).max_model_len == 4096
