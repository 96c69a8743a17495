import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from core import metrics, metrics_server
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


@pytest.fixture
def scraped() -> Iterator[tuple[str, int]]:
    server = metrics.serve(0, CollectorRegistry())
    yield ("127.0.0.1", server.port)
    server.close()


REQUEST = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


def test_who_holds_connections_keeps_no_scraper_out(scraped: tuple[str, int]) -> None:
    with ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(scraped, 20))
            for _ in range(3 * metrics_server.MAX_CONNECTIONS)
        ]
        with socket.create_connection(scraped, 20) as scraper:
            scraper.sendall(REQUEST)
            assert scraper.recv(2**16).startswith(b"HTTP/1.0 200")
        num_threads = sum(t.name.startswith("Thread-") for t in threading.enumerate())
        assert num_threads <= metrics_server.MAX_CONNECTIONS
        assert held[0].recv(1) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET",
        b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 10_000,
        b"\x16\x03\x01\x00",
        b"\r\n\r\n",
    ],
    ids=["nothing", "a word", "an open header", "TLS", "blank"],
)
def test_requests_that_do_not_come_to_an_end(
    scraped: tuple[str, int], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.2)
    with socket.create_connection(scraped, 20) as client:
        client.sendall(data)
        with suppress(ConnectionError):
            assert client.recv(2**16) == b""


def test_a_head_without_an_end_is_not_kept(scraped: tuple[str, int]) -> None:
    def pour(client: socket.socket) -> None:
        for _ in range(10_000):
            client.sendall(b"x" * 65536)

    with socket.create_connection(scraped, 20) as client, pytest.raises(ConnectionError):
        pour(client)
