import urllib.request
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from core import metrics
from core.version import software_version


def test_a_registry_is_served_until_closed() -> None:
    registry = CollectorRegistry()
    Counter("epserve_test_total", "A test.", registry=registry).inc(3)
    server = metrics.serve(0, registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as reply:
        families = {f.name: f for f in text_string_to_metric_families(reply.read().decode())}
    assert families["epserve_test"].samples[0].value == 3
    with pytest.raises(OSError, match="in use"):
        metrics.serve(server.port, registry)
    server.close()
    server.close()
    metrics.serve(server.port, registry).close()  # the port is free again


def test_switched_off() -> None:
    server = metrics.serve(-1, CollectorRegistry())
    assert server.port == -1
    server.close()


def test_buckets_rise() -> None:
    found = {name: value for name, value in vars(metrics).items() if name.endswith("_BUCKETS")}
    assert found
    for name, buckets in found.items():
        assert all(low < high for low, high in pairwise(buckets)), name


def test_a_process_adds_its_labels_and_what_the_system_knows_of_it() -> None:
    registry = metrics.ProcessRegistry(role="decode")
    Counter("epserve_test_total", "A test.", ["kind"], registry=registry).labels("a").inc()
    metrics.add_build_info(registry, "decode")
    assert registry.get_sample_value("epserve_test_total", {"kind": "a", "role": "decode"}) == 1
    assert registry.get_sample_value("process_cpu_seconds_total", {"role": "decode"}) is not None
    labels = {"role": "decode", "version": software_version()}
    assert registry.get_sample_value("epserve_build_info", labels) == 1
