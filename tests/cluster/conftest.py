"""Clusters for all tests that only talk to them."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.harness import SMALL_CHUNKS, Cluster
from tests.tracing.collector import Collector, collecting


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pair of workers, for tests that only talk HTTP to it."""
    options = ("--decode-ranks", "1", *SMALL_CHUNKS)
    with Cluster(tmp_path_factory.mktemp("served"), *options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def observed(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With two decode workers that draft, logs in JSON, and traces."""
    options = ["--decode-workers", "2", "--decode-ranks", "1", "--speculative-tokens", "2"]
    options += ["--served-model-name", "demo", "--otlp-endpoint", collector.address]
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # of this cluster alone
            patch.setenv("EPSERVE_LOG_FORMAT", "json")
            cluster = Cluster(tmp_path_factory.mktemp("observed"), *options)
            stack.enter_context(cluster)
        yield cluster
