"""One cluster for all tests that only talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pair of workers, for tests that only talk HTTP to it."""
    with Cluster(Path(tmp_path_factory.mktemp("served")), "--decode-ranks", "1") as cluster:
        yield cluster
