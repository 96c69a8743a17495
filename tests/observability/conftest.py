"""One small cluster, scraped by a real Prometheus, that has been through everything."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.harness import Cluster, wait_until
from tests.observability.prometheus import Prometheus
from tests.observability.scenario import OPTIONS, metrics_targets, play


class Played(NamedTuple):
    """Still running, and quiet."""

    cluster: Cluster
    prometheus: Prometheus
    targets: dict[str, str]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = Path(tmp_path_factory.mktemp("scraped"))
    with Cluster(folder / "logs", *OPTIONS) as cluster:
        targets = metrics_targets(cluster)
        with Prometheus(folder / "prometheus", targets) as prometheus:
            asyncio.run(play(cluster, prometheus))
            # What happened last has been scraped when a later scrape says so.
            ended = 'sum(epserve_gateway_num_running_requests) == 0 and sum(up{job="gateway"}) == 1'
            wait_until(lambda: prometheus.now(ended), 120, "a scrape behind the last request")
            yield Played(cluster, prometheus, targets)
