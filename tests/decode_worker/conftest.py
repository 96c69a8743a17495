"""A Decode service whose peers do as they are told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.decode_worker.scripted import Cluster, cluster


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, quarantine_lease_seconds=0.4) as running:
        yield running
