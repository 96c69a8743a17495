"""A cluster that is not left in time is killed, and tells where its threads were."""

import time
import urllib.request

import pytest

from bench.serving.local_cluster import ClusterError, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(120)]


def hang() -> None:
    with local_cluster(most_seconds=25) as url:
        while True:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            time.sleep(0.2)


def test_a_cluster_that_is_not_left_in_time_tells_where_its_threads_are() -> None:
    with pytest.raises(ClusterError, match="not over after 25 s") as caught:
        hang()
    said = str(caught.value)
    for name in ("gateway", "router", "prefill-0", "decode-0"):
        log = said.partition(f"--- {name}.log")[2].partition("\n--- ")[0]
        assert "most recent call first" in log, name
    assert "engine/rank_loop.py" in said  # where ranks wait for work
