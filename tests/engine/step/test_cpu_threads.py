"""Threads are given out by work, and the estimate of work is that of the weights on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.step.cpu_threads import CpuThreads, active_weights
from model.config import ModelConfig
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def _thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("q_lora_rank", [None, 48])
def test_active_weights_are_those_on_disk(tmp_path: Path, q_lora_rank: int | None) -> None:
    folder = make_tiny_checkpoint(tmp_path, q_lora_rank=q_lora_rank)
    config = ModelConfig.from_folder(folder)
    active = 0.0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and ".layers." in name and ".gate.weight" not in name:
                share = config.experts_per_token / config.num_experts if ".experts." in name else 1
                active += share * shape[0] * shape[1]
    assert active_weights(config) == active


def test_small_passes_get_one_thread_and_large_ones_all(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_checkpoint(tmp_path))
    threads = CpuThreads(config, most=3)
    assert torch.get_num_threads() == 3
    counts = [threads.prepare(num_tokens) for num_tokens in (0, 1, 100, 10**4, 10**6, 1)]
    assert counts[:3] == [1, 1, 1]
    assert counts[4:] == [3, 1]
    assert counts == sorted(counts[:5]) + [1]
    assert torch.get_num_threads() == 1
