"""A tiny checkpoint, loaded once for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.prefill_worker.one_rank import Model
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.transfer.memory import MemoryTransfer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder)


@pytest.fixture(autouse=True)
def _fresh_agents() -> Iterator[None]:
    yield
    MemoryTransfer._alive.clear()
