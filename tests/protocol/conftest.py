"""The product's code as it runs in a world of the explorer."""

import gc
from collections.abc import Iterator

import pytest

from tests.protocol.failover import stream_clients
from tests.protocol.workers import stand_ins


@pytest.fixture(autouse=True)
def _stand_ins() -> Iterator[None]:
    gc.freeze()  # worlds are full of circles: only they are to be gone through
    with stand_ins(), stream_clients():
        yield
    gc.unfreeze()
