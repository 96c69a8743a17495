"""Ranks of one group that do not load equally fast, as processes of their own."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from engine.process.front import StartError, WorkerFront
from engine.process.settings import WorkerSettings
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.model.weights.test_dummy_checkpoint import FP8, config_folder

UNEVEN_RANK = Path(__file__).parent / "uneven_rank.py"
STEP_SECONDS = 2.0
PATIENCE_SECONDS = 100.0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return WorkerSettings.model_validate(
        {
            "model": config_folder(tmp_path / "model", FP8),
            "load_format": "dummy",
            "threads": 1,
            "kv_pages": 8,
            "page_tokens": 16,
            "max_model_len": 64,
            "start_timeout_seconds": PATIENCE_SECONDS,
            "step_timeout_seconds": STEP_SECONDS,
        }  # fmt: skip
    )


def front_of(settings: WorkerSettings, how: str, seconds: float, **changes: object) -> WorkerFront:
    changed = settings.model_copy(update=changes)
    return WorkerFront(changed, "decode", (sys.executable, str(UNEVEN_RANK), how, str(seconds)))


async def test_a_rank_may_load_longer_than_a_step_may_take(settings: WorkerSettings) -> None:
    front = front_of(settings, "slow", 2 * STEP_SECONDS, ranks=2)
    try:
        await front.start()
        waited, slow = (dict(ready.start_seconds) for ready in front.ready)
        assert slow["load"] > 2 * STEP_SECONDS
        assert waited["load"] < STEP_SECONDS < sum(waited.values())
        await eventually(lambda: all(stats.pages_total for stats in front.stats))
        assert not front.died.done()
    finally:
        await front.stop(1)


async def test_a_death_on_one_node_ends_the_start_on_all(settings: WorkerSettings) -> None:
    """Although the other is loading, and does not look at its peers."""
    together = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    fronts = [
        front_of(settings, "dies", 10 * PATIENCE_SECONDS, node_rank=node, **together)
        for node in range(2)
    ]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            first, second = await asyncio.gather(
                *(front.start() for front in fronts), return_exceptions=True
            )
        assert isinstance(first, StartError)
        assert "status 70" in str(first)
        assert isinstance(second, StartError)
        assert "status 9" in str(second)
    finally:
        for front in fronts:
            await front.stop(1)
