"""How many pages a rank gets, and what that does to the longest request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kv.kv_memory import HOST_KV_BYTES, LEAST_PAGES, KvPlan, make_kv_cache, plan_kv
from engine.process.settings import WorkerSettings

PAGE_BYTES = 2 * 64 * 10 * 4  # layers, tokens, kv_dim, float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def plan(folder: Path, memory_bytes: int, max_position: int = 4096, **told: Any) -> KvPlan:  # noqa: ANN401
    config: Any = SimpleNamespace(num_kv_layers=2, kv_dim=10, max_position=max_position)
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


def test_a_host_keeps_memory_for_others_unless_told_otherwise(folder: Path) -> None:
    told = {"max_running": 4096}
    bounded = plan(folder, 10**12, **told)
    assert bounded.num_pages == HOST_KV_BYTES // PAGE_BYTES
    assert plan(folder, 10**12, device="cuda", **told).num_pages == 4096 * 64
    assert plan(folder, 10**12, max_position=10**8).max_model_len == 10**8  # one must fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_zero_and_of_the_agreed_shape(folder: Path, dtype: torch.dtype) -> None:
    config: Any = SimpleNamespace(num_kv_layers=2, kv_dim=10, max_position=640)
    settings = WorkerSettings(model=folder, kv_pages=5)
    made = plan_kv(settings, config, itemsize=dtype.itemsize, memory_bytes=0)
    cache = make_kv_cache(settings, config, made, torch.device("cpu"), dtype)
    assert cache.shape == (2, 5, 64, 10)
    assert cache.dtype == dtype
    assert cache.is_contiguous()
    assert not cache.any()
    cache.fill_(1)
