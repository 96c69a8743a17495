"""Memory that nobody wrote is NaN in every kernel test, so that a read of it shows at once."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
