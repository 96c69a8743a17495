"""Memory that a rank plans with: its share of a GPU, and never what others hold."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.process.settings import WorkerSettings
from engine.start import rank_memory
from engine.start.memory_plan import LIBRARY_BYTES
from engine.start.rank_memory import RankMemory

GIB = 1 << 30
TOTAL = 140 * GIB


@pytest.mark.parametrize(
    ("share", "others", "planned"),
    [(1.0, 0, 140), (0.5, 0, 70), (0.5, 60, 70), (0.5, 90, 50), (1.0, 100, 40)],
)
@pytest.mark.parametrize("own_gib", [0, 1])
def test_a_rank_plans_with_its_share_of_what_others_leave(
    share: float, others: int, planned: int, own_gib: int
) -> None:
    reserved = own_gib * GIB  # of torch
    free = TOTAL - reserved - LIBRARY_BYTES - others * GIB
    memory = RankMemory.of_gpu(share, TOTAL, free, reserved)
    assert memory == RankMemory(num_bytes=planned * GIB, others_bytes=others * GIB)


def test_own_libraries_are_not_put_down_to_others() -> None:
    for taken in (0, LIBRARY_BYTES // 3, LIBRARY_BYTES):
        assert RankMemory.of_gpu(1.0, TOTAL, TOTAL - taken, 0) == RankMemory(num_bytes=TOTAL)


def test_a_gpu_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second worker on a GPU that a first one has filled."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    settings = WorkerSettings(model=tmp_path, device="cuda")
    memory = RankMemory.of(settings, torch.device("cuda", 1))
    assert memory == RankMemory(num_bytes=18 * GIB, others_bytes=122 * GIB)


def test_the_rank_with_least_decides() -> None:
    told = [(9, 2), (7, 5), (8, 0)]
    group: Any = SimpleNamespace(exchange=lambda facts: [tuple(facts), *told])
    agreed = RankMemory(num_bytes=8).agreed(group)
    assert agreed == RankMemory(num_bytes=7, others_bytes=5)


def test_ranks_share_a_host_or_what_a_container_may_take_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = WorkerSettings(model=tmp_path, ranks=4)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(rank_memory, "CONTAINER_LIMIT", limit)
    unlimited = RankMemory.of(settings, torch.device("cpu")).num_bytes
    limit.write_text("max\n")
    assert RankMemory.of(settings, torch.device("cpu")).num_bytes == unlimited
    limit.write_text("4000\n")
    assert RankMemory.of(settings, torch.device("cpu")).num_bytes == 1000
